"""The unmodified `openai` Python SDK against a running gateway.

The Rust test that starts the gateway passes, in the environment:
TOLLGATE_URL, TOLLGATE_CA, TOLLGATE_KEY (an open plan), TOLLGATE_KEY_RATE (two
requests at once, then one a second), TOLLGATE_KEY_SPENT (a daily cap of which
nothing is left), TOLLGATE_KEY_SCOPED (may not call chat completions).
"""

import json
import os
import ssl
import time
import typing
import unittest

import openai
import pydantic

URL = os.environ["TOLLGATE_URL"] + "/v1"
TLS = ssl.create_default_context(cafile=os.environ["TOLLGATE_CA"])
MODEL = "tollgate-demo"
QUESTION = [{"role": "user", "content": "What is a rate limit?"}]
COUNT = [{"role": "user", "content": "Count from 1 to 20."}]


class Requests:
    """Counts the requests that the SDK sends, with retries."""

    def __init__(self):
        self.sent = []

    def __call__(self, request):
        self.sent.append(request)


def client(key="TOLLGATE_KEY", counter=None, **options):
    hooks = {"request": [counter]} if counter else {}
    http = openai.DefaultHttpxClient(verify=TLS, event_hooks=hooks)
    return openai.OpenAI(base_url=URL, api_key=os.environ.get(key, key), http_client=http, **options)


class Chat(unittest.TestCase):
    def test_answer(self):
        answer = client().chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
        self.assertTrue(answer.id.startswith("chatcmpl-"))
        self.assertEqual(answer.object, "chat.completion")
        self.assertEqual(answer.model, MODEL)
        self.assertEqual(answer.choices[0].finish_reason, "stop")
        self.assertEqual(answer.choices[0].message.role, "assistant")
        self.assertIn("limit", answer.choices[0].message.content)
        usage = answer.usage
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        self.assertGreater(usage.prompt_tokens, 5)
        self.assertGreater(usage.completion_tokens, 5)

    def test_stream_equals_answer(self):
        sdk = client()
        whole = sdk.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
        chunks = list(
            sdk.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertGreater(len(chunks), 4)
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
        self.assertEqual(reasons[-1], "stop")
        self.assertEqual(set(reasons[:-1]), {None})
        self.assertEqual(chunks[-1].choices, [])
        self.assertEqual(chunks[-1].usage.total_tokens, whole.usage.total_tokens)
        self.assertTrue(all(c.usage is None for c in chunks[:-1]))
        self.assertEqual(len({c.id for c in chunks}), 1)

    def test_stream_without_usage(self):
        chunks = client().chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        self.assertTrue(all(c.choices for c in chunks))

    def test_n(self):
        answer = client().chat.completions.create(
            model=MODEL, messages=QUESTION, n=3, temperature=1.2, seed=7
        )
        self.assertEqual([c.index for c in answer.choices], [0, 1, 2])
        again = client().chat.completions.create(
            model=MODEL, messages=QUESTION, n=3, temperature=1.2, seed=7
        )
        self.assertEqual(
            [c.message.content for c in answer.choices], [c.message.content for c in again.choices]
        )

    def test_stop(self):
        whole = client().chat.completions.create(model=MODEL, messages=COUNT, temperature=0)
        stop = whole.choices[0].message.content.split()[3]
        cut = client().chat.completions.create(
            model=MODEL, messages=COUNT, temperature=0, stop=[stop, "never said"]
        )
        self.assertEqual(cut.choices[0].finish_reason, "stop")
        self.assertEqual(
            cut.choices[0].message.content, whole.choices[0].message.content.split(stop)[0]
        )

    def test_max_tokens(self):
        for field in ("max_tokens", "max_completion_tokens"):
            answer = client().chat.completions.create(
                model=MODEL, messages=COUNT, temperature=0, **{field: 5}
            )
            self.assertEqual(answer.choices[0].finish_reason, "length", field)
            self.assertEqual(answer.usage.completion_tokens, 5, field)

    def test_logprobs(self):
        answer = client().chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
        )
        content = answer.choices[0].logprobs.content
        self.assertEqual(len(content), 4)
        self.assertEqual("".join(t.token for t in content), answer.choices[0].message.content)
        for token in content:
            self.assertLessEqual(token.logprob, 0)
            self.assertEqual(len(token.top_logprobs), 3)
            self.assertEqual(token.token, token.top_logprobs[0].token)
            self.assertEqual(bytes(token.bytes).decode(), token.token)

    def test_logit_bias_and_penalties(self):
        plain = client().chat.completions.create(
            model=MODEL, messages=COUNT, temperature=0, max_tokens=8, logprobs=True
        )
        banned = client().completions.create(model=MODEL, prompt="a", max_tokens=1, logit_bias={"70": 100})
        self.assertEqual(banned.usage.completion_tokens, 1)
        pushed = client().chat.completions.create(
            model=MODEL, messages=COUNT, temperature=0, max_tokens=8, frequency_penalty=2.0
        )
        self.assertEqual(plain.usage.prompt_tokens, pushed.usage.prompt_tokens)


class Completions(unittest.TestCase):
    def test_prompts(self):
        answer = client().completions.create(
            model=MODEL, prompt=["What is", "A rate limit"], max_tokens=6, n=2, temperature=0
        )
        self.assertTrue(answer.id.startswith("cmpl-"))
        self.assertEqual([c.index for c in answer.choices], [0, 1, 2, 3])
        self.assertEqual(answer.choices[0].text, answer.choices[1].text)

    def test_token_prompt_and_logprobs(self):
        answer = client().completions.create(
            model=MODEL, prompt=[72, 73, 74], max_tokens=3, logprobs=2, temperature=0
        )
        self.assertEqual(answer.usage.prompt_tokens, 3)
        self.assertEqual(len(answer.choices[0].logprobs.tokens), 3)
        self.assertEqual(len(answer.choices[0].logprobs.top_logprobs[0]), 2)

    def test_echo(self):
        answer = client().completions.create(
            model=MODEL, prompt="A rate limit", echo=True, max_tokens=3, temperature=0
        )
        self.assertTrue(answer.choices[0].text.startswith("A rate limit"))

    def test_stream(self):
        chunks = list(client().completions.create(model=MODEL, prompt="A", max_tokens=5, stream=True))
        self.assertIn(chunks[-1].choices[0].finish_reason, ("length", "stop"))


class Window(pydantic.BaseModel):
    unit: typing.Literal["second", "minute"]
    length: int = pydantic.Field(ge=1, le=60)


class Limit(pydantic.BaseModel):
    kind: typing.Literal["rate", "cap"]
    window: Window
    note: typing.Optional[str] = pydantic.Field(max_length=12)


class Structured(unittest.TestCase):
    """The SDK makes the schema and reads the answer; both must agree with the gateway."""

    FIELDS = {"model": MODEL, "messages": QUESTION, "response_format": Limit, "max_tokens": 300}

    def test_parse(self):
        for seed in range(4):
            answer = client().chat.completions.parse(**self.FIELDS, temperature=1, seed=seed)
            limit = answer.choices[0].message.parsed
            self.assertIn(limit.kind, ("rate", "cap"))
            self.assertTrue(1 <= limit.window.length <= 60)

    def test_stream_helper(self):
        with client().chat.completions.stream(**self.FIELDS, temperature=0) as stream:
            events = [event.type for event in stream]
            answer = stream.get_final_completion()
        self.assertIn("content.delta", events)
        self.assertIsInstance(answer.choices[0].message.parsed, Limit)

    def test_json_object(self):
        fields = {**self.FIELDS, "response_format": {"type": "json_object"}, "seed": 5}
        choice = client().chat.completions.create(**fields).choices[0]
        if choice.finish_reason == "stop":
            self.assertIsInstance(json.loads(choice.message.content), dict)
        self.assertTrue(choice.message.content.startswith("{"))

    def test_unenforceable_schema(self):
        schema = {"type": "object", "properties": {"a": {"not": {}}}}
        fields = {**self.FIELDS, "response_format": {
            "type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
        with self.assertRaises(openai.BadRequestError) as caught:
            client().chat.completions.create(**fields)
        self.assertEqual(
            caught.exception.param, "response_format.json_schema.schema.properties.a.not"
        )


class Models(unittest.TestCase):
    def test_list_and_retrieve(self):
        models = client().models.list().data
        self.assertEqual([m.id for m in models], [MODEL])
        self.assertEqual(client().models.retrieve(MODEL).id, MODEL)
        with self.assertRaises(openai.NotFoundError):
            client().models.retrieve("no-such-model")


class Errors(unittest.TestCase):
    def chat(self, key="TOLLGATE_KEY", counter=None, **fields):
        arguments = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, **fields}
        return client(key, counter).chat.completions.create(**arguments)

    def refused(self, kind, sends, key="TOLLGATE_KEY", **fields):
        counter = Requests()
        with self.assertRaises(kind) as caught:
            self.chat(key, counter, **fields)
        self.assertEqual(len(counter.sent), sends)
        error = caught.exception
        self.assertEqual(set(error.body), {"message", "type", "param", "code"})
        self.assertTrue(error.request_id.startswith("req-"))
        return error

    def test_bad_request_names_the_field(self):
        for field, value in [
            ("temperature", 2.5),
            ("top_p", -0.1),
            ("n", 9),
            ("max_tokens", 0),
            ("stop", ["a"] * 17),
            ("top_logprobs", 21),
            ("presence_penalty", 3),
            ("logit_bias", {"999999": 1}),
            ("response_format", {"type": "xml"}),
            ("tools", [{"type": "function", "function": {"name": "f g"}}]),
        ]:
            fields = {field: value}
            if field == "top_logprobs":
                fields["logprobs"] = True
            error = self.refused(openai.BadRequestError, 1, **fields)
            self.assertTrue(error.param.startswith(field), (field, error.param))
            self.assertEqual(error.type, "invalid_request_error")

    def test_prompt_longer_than_the_context(self):
        long = [{"role": "user", "content": "limit " * 3000}]
        error = self.refused(openai.BadRequestError, 1, messages=long)
        self.assertEqual(error.code, "context_length_exceeded")

    def test_authentication(self):
        error = self.refused(openai.AuthenticationError, 1, key="tg-wrong")
        self.assertEqual(error.code, "invalid_api_key")

    def test_permission(self):
        self.refused(openai.PermissionDeniedError, 1, key="TOLLGATE_KEY_SCOPED")

    def test_unknown_model(self):
        error = self.refused(openai.NotFoundError, 1, model="gpt-none")
        self.assertEqual(error.code, "model_not_found")

    def test_spent_cap_is_not_retried(self):
        error = self.refused(openai.RateLimitError, 1, key="TOLLGATE_KEY_SPENT")
        self.assertEqual(error.code, "insufficient_quota")

    def test_rate_limit_is_waited_for(self):
        counter = Requests()
        started = time.monotonic()
        for _ in range(4):
            self.chat("TOLLGATE_KEY_RATE", counter)
        # Two pass at once, two more want a second each: the SDK waits as asked
        # and succeeds, so it sent more than four.
        self.assertGreater(len(counter.sent), 4)
        self.assertGreater(time.monotonic() - started, 1.0)

    def test_rate_limit_without_retries(self):
        sdk = client("TOLLGATE_KEY_RATE", max_retries=0)
        with self.assertRaises(openai.RateLimitError) as caught:
            for _ in range(8):
                sdk.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
        self.assertEqual(caught.exception.code, "rate_limit_exceeded")
        headers = caught.exception.response.headers
        self.assertGreater(int(headers["retry-after-ms"]), 0)
        self.assertEqual(headers["x-ratelimit-remaining-requests"], "0")


class Headers(unittest.TestCase):
    def test_success_tells_the_truth(self):
        raw = client().chat.completions.with_raw_response.create(
            model=MODEL, messages=QUESTION, max_tokens=4
        )
        first = int(raw.headers["x-ratelimit-remaining-requests"])
        limit = int(raw.headers["x-ratelimit-limit-requests"])
        self.assertLess(first, limit)
        self.assertTrue(raw.headers["x-request-id"].startswith("req-"))


class Idempotency(unittest.TestCase):
    """Repeats a request with its key, like an application that lost the answer."""

    def ask(self, key, **fields):
        fields = {"max_tokens": 5, **fields}
        return client().chat.completions.with_raw_response.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            extra_headers={"Idempotency-Key": key},
            **fields,
        )

    def test_it_runs_once(self):
        first, again = self.ask("sdk-once"), self.ask("sdk-once")
        self.assertEqual(first.parse().id, again.parse().id)
        self.assertEqual(again.headers["x-tollgate-replay-of"], first.headers["x-request-id"])
        self.assertNotIn("x-tollgate-replay-of", first.headers)
        self.assertNotEqual(self.ask("sdk-other").parse().id, first.parse().id)

    def test_another_request_with_the_key_is_refused(self):
        self.ask("sdk-clash")
        with self.assertRaises(openai.UnprocessableEntityError):
            self.ask("sdk-clash", max_tokens=6)


class UsageAfterAnAbort(unittest.TestCase):
    def test_what_was_done_is_known_to_the_nanosecond(self):
        sdk = client()
        raw = sdk.chat.completions.with_raw_response.create(
            model=MODEL, messages=COUNT, temperature=0, max_tokens=400, stream=True
        )
        stream = raw.parse()
        next(stream)
        stream.close()
        request = raw.headers["x-request-id"]
        for _ in range(200):
            try:
                usage = sdk.get(f"/usage/{request}", cast_to=dict)
            except openai.NotFoundError:
                usage = {}  # nothing of it is in the ledger yet
            if usage.get("state") == "posted":
                break
            time.sleep(0.1)
        self.assertEqual(usage["state"], "posted")
        self.assertGreater(usage["prompt_tokens"], 5)
        self.assertGreater(usage["attributed_ns"], 0)
        entries = [entry["amount_ns"] for entry in usage["entries"]]
        self.assertEqual(sum(entries), usage["attributed_ns"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
