"""Files and batches by the unmodified OpenAI SDK."""

import io
import json
import os
import pathlib
import ssl
import tempfile
import time

import openai

tls = ssl.create_default_context(cafile=os.environ["TOLLGATE_CA"])


def client(key):
    return openai.OpenAI(
        base_url=os.environ["TOLLGATE_URL"] + "/v1",
        api_key=os.environ[key],
        http_client=openai.DefaultHttpxClient(verify=tls),
        max_retries=2,
    )


def line(number, question="Say hello.", **body):
    body = {
        "model": "tollgate-demo",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 8,
        **body,
    }
    request = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps({**request, "body": body}) + "\n"


def ended(acme, batch, within=60):
    deadline = time.monotonic() + within
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = acme.batches.retrieve(batch.id)
    return batch


def rows(acme, file):
    return [json.loads(row) for row in acme.files.content(file).text.splitlines()]


def refused(act, status, code):
    try:
        act()
    except openai.APIStatusError as error:
        assert (error.status_code, error.code) == (status, code), error
        return error
    raise AssertionError("it was not refused")


acme, other = client("TOLLGATE_KEY"), client("TOLLGATE_KEY_OTHER")
text = "".join(line(number) for number in range(30)) + line(30, max_tokens=-1)

# An upload from a path, from bytes and from a stream.
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "input.jsonl"
    path.write_text(text)
    file = acme.files.create(file=path, purpose="batch")
assert (file.object, file.purpose, file.status) == ("file", "batch", "processed"), file
assert (file.bytes, file.filename) == (len(text), "input.jsonl"), file
from_bytes = acme.files.create(file=("bytes.jsonl", text.encode()), purpose="batch")
from_stream = acme.files.create(
    file=io.BytesIO(text.encode()),
    purpose="batch",
    expires_after={"anchor": "created_at", "seconds": 3600},
)
assert from_stream.expires_at - from_stream.created_at == 3600, from_stream
assert acme.files.content(from_bytes.id).text == text

# Create, poll, download.
batch = acme.batches.create(
    input_file_id=file.id,
    endpoint="/v1/chat/completions",
    completion_window="24h",
    metadata={"run": "nightly"},
)
refused(lambda: acme.files.delete(file.id), 409, "file_in_use") if batch.status == "validating" else None
batch = ended(acme, batch)
assert batch.status == "completed" and batch.metadata == {"run": "nightly"}, batch
assert batch.request_counts.total == 31 and batch.request_counts.completed == 30, batch
answers = rows(acme, batch.output_file_id)
assert sorted(answer["custom_id"] for answer in answers) == sorted(f"line-{n}" for n in range(30))
assert all(answer["response"]["status_code"] == 200 for answer in answers)
assert answers[0]["response"]["body"]["choices"][0]["message"]["content"].startswith("Hello")
[error] = rows(acme, batch.error_file_id)
assert (error["custom_id"], error["response"]["status_code"]) == ("line-30", 400), error
tokens = sum(answer["response"]["body"]["usage"]["total_tokens"] for answer in answers)
assert batch.usage.total_tokens == tokens, (batch.usage, tokens)

# A cancel keeps finished answers; every line is in one of the two files.
long = "".join(line(n, "Count from 1 to 400.", max_tokens=400) for n in range(200))
long = acme.files.create(file=("long.jsonl", long.encode()), purpose="batch")
batch = acme.batches.create(
    input_file_id=long.id, endpoint="/v1/chat/completions", completion_window="24h"
)
batch = acme.batches.cancel(batch.id)
assert batch.status in ("cancelling", "cancelled"), batch
batch = ended(acme, batch)
assert batch.status == "cancelled" and batch.cancelled_at, batch
found = []
for part in (batch.output_file_id, batch.error_file_id):
    found += rows(acme, part) if part else []
if found:
    assert sorted(row["custom_id"] for row in found) == sorted(f"line-{n}" for n in range(200))
refused(lambda: acme.batches.cancel("batch_" + "0" * 32), 404, "not_found")

# An input with mistakes names its lines.
wrong = acme.files.create(file=("wrong.jsonl", b'{"custom_id": "a"\n{}\n'), purpose="batch")
batch = ended(
    acme,
    acme.batches.create(
        input_file_id=wrong.id, endpoint="/v1/chat/completions", completion_window="24h"
    ),
)
assert batch.status == "failed", batch
assert {(error.code, error.line) for error in batch.errors.data} == {
    ("invalid_json_line", 1),
    ("missing_required_parameter", 2),
}, batch.errors

# Lists in pages.
names = [file.id for file in acme.files.list(limit=2, purpose="batch")]
assert len(names) == len(set(names)) == 5, names
assert [batch.id for batch in acme.batches.list(limit=1)][0] == batch.id

# Another tenant sees nothing of all this.
assert other.files.list().data == [] and other.batches.list().data == []
refused(lambda: other.files.retrieve(file.id), 404, "not_found")
refused(lambda: other.files.content(batch.input_file_id), 404, "not_found")
refused(lambda: other.batches.retrieve(batch.id), 404, "not_found")

# Delete.
assert acme.files.delete(from_bytes.id).deleted
refused(lambda: acme.files.retrieve(from_bytes.id), 404, "not_found")
refused(
    lambda: acme.files.create(file=("x.jsonl", b"{}"), purpose="assistants"), 400, "invalid_value"
)
print("files and batches: right")
