// Files and batches by the unmodified OpenAI SDK for Node.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { createReadStream, mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

const require = createRequire(process.env.TOLLGATE_NODE_MODULES + "/");
const { OpenAI, toFile } = require("openai");
const client = new OpenAI({
  baseURL: `${process.env.TOLLGATE_URL}/v1`,
  apiKey: process.env.TOLLGATE_KEY,
});

const line = (number) =>
  JSON.stringify({
    custom_id: `line-${number}`,
    method: "POST",
    url: "/v1/chat/completions",
    body: {
      model: "tollgate-demo",
      messages: [{ role: "user", content: "Say hello." }],
      max_tokens: 8,
    },
  }) + "\n";
const text = Array.from({ length: 12 }, (_, number) => line(number)).join("");

test("a batch from a stream runs to its end", async () => {
  const path = join(mkdtempSync(join(tmpdir(), "tollgate-")), "input.jsonl");
  writeFileSync(path, text);
  const file = await client.files.create({ file: createReadStream(path), purpose: "batch" });
  assert.equal(file.filename, "input.jsonl");
  let batch = await client.batches.create({
    input_file_id: file.id,
    endpoint: "/v1/chat/completions",
    completion_window: "24h",
  });
  const deadline = Date.now() + 60_000;
  while (batch.status !== "completed") {
    assert.ok(Date.now() < deadline, batch.status);
    await new Promise((wake) => setTimeout(wake, 100));
    batch = await client.batches.retrieve(batch.id);
  }
  assert.equal(batch.request_counts.completed, 12);
  const answers = await (await client.files.content(batch.output_file_id)).text();
  assert.equal(answers.trim().split("\n").length, 12);
  const deleted = await client.files.delete(file.id);
  assert.equal(deleted.deleted, true);
});

test("an upload that is refused tells why", async () => {
  // Larger than what a refused upload may leave unread.
  const large = await toFile(Buffer.alloc(3 << 20, "x"), "large.jsonl");
  await assert.rejects(client.files.create({ file: large, purpose: "batch" }, { maxRetries: 0 }), {
    status: 413,
  });
  const wrong = await toFile(Buffer.from("{}"), "wrong.jsonl");
  await assert.rejects(client.files.create({ file: wrong, purpose: "vision" }), { status: 400 });
});

test("lists come in pages", async () => {
  for (let number = 0; number < 3; number += 1) {
    await client.files.create({ file: await toFile(Buffer.from(text), "x.jsonl"), purpose: "batch" });
  }
  const seen = new Set();
  for await (const file of client.files.list({ limit: 2 })) seen.add(file.id);
  assert.ok(seen.size >= 3, String(seen.size));
});
