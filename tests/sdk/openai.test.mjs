// The unmodified `openai` Node SDK against a running gateway. The Rust test
// that starts the gateway passes the same variables as to the Python one.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";

const require = createRequire(process.env.TOLLGATE_NODE_MODULES + "/");
const { OpenAI } = require("openai");

const MODEL = "tollgate-demo";
const QUESTION = [{ role: "user", content: "What is a rate limit?" }];

function client(key = "TOLLGATE_KEY", sent = []) {
  return new OpenAI({
    baseURL: process.env.TOLLGATE_URL + "/v1",
    apiKey: process.env[key] ?? key,
    fetch: (url, init) => {
      sent.push(url);
      return fetch(url, init);
    },
  });
}

const ask = (sdk, fields = {}) =>
  sdk.chat.completions.create({ model: MODEL, messages: QUESTION, temperature: 0, ...fields });

test("chat, and the stream says the same", async () => {
  const whole = await ask(client());
  assert.equal(whole.choices[0].finish_reason, "stop");
  assert.match(whole.choices[0].message.content, /limit/);
  const stream = await ask(client(), { stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.total_tokens, whole.usage.total_tokens);
});

test("n, stop and logprobs", async () => {
  const several = await ask(client(), { n: 2, max_tokens: 5 });
  assert.deepEqual(several.choices.map((choice) => choice.index), [0, 1]);
  const stopped = await ask(client(), { stop: " " });
  assert.equal(stopped.choices[0].finish_reason, "stop");
  assert.ok(!stopped.choices[0].message.content.includes(" "));
  const scored = await ask(client(), { logprobs: true, top_logprobs: 2, max_tokens: 3 });
  assert.equal(scored.choices[0].logprobs.content.length, 3);
  assert.equal(scored.choices[0].logprobs.content[0].top_logprobs.length, 2);
});

test("completions and models", async () => {
  const answer = await client().completions.create({ model: MODEL, prompt: "A rate", max_tokens: 4 });
  assert.equal(answer.object, "text_completion");
  const names = [];
  for await (const model of client().models.list()) names.push(model.id);
  assert.deepEqual(names, [MODEL]);
});

test("a client that leaves does not disturb the next", async () => {
  const count = [{ role: "user", content: "Count from 1 to 400." }];
  const stream = await ask(client(), { messages: count, stream: true });
  for await (const _chunk of stream) {
    stream.controller.abort();
    break;
  }
  assert.ok((await ask(client())).choices[0].message.content);
});

for (const [name, key, fields, kind, sends] of [
  ["a bad field", "TOLLGATE_KEY", { temperature: 9 }, "BadRequestError", 1],
  ["a wrong key", "tg-wrong", {}, "AuthenticationError", 1],
  ["a key without the scope", "TOLLGATE_KEY_SCOPED", {}, "PermissionDeniedError", 1],
  ["an unknown model", "TOLLGATE_KEY", { model: "none" }, "NotFoundError", 1],
  ["a spent cap", "TOLLGATE_KEY_SPENT", {}, "RateLimitError", 1],
]) {
  test(`${name} is ${kind} after ${sends} request`, async () => {
    const sent = [];
    await assert.rejects(ask(client(key, sent), fields), (error) => {
      assert.equal(error.constructor.name, kind);
      assert.ok(error.requestID.startsWith("req-"));
      return true;
    });
    assert.equal(sent.length, sends);
  });
}

test("parse reads an answer of a schema", async () => {
  const schema = {
    type: "object",
    properties: {
      kind: { type: "string", enum: ["rate", "cap"] },
      lengths: { type: "array", items: { type: "integer", minimum: 0, maximum: 9 }, maxItems: 3 },
    },
    required: ["kind", "lengths"],
    additionalProperties: false,
  };
  const response_format = { type: "json_schema", json_schema: { name: "limit", strict: true, schema } };
  const fields = { model: MODEL, messages: QUESTION, max_tokens: 200, response_format };
  for (let seed = 0; seed < 4; seed += 1) {
    const answer = await client().chat.completions.create({ ...fields, temperature: 1, seed });
    const { kind, lengths } = JSON.parse(answer.choices[0].message.content);
    assert.ok(["rate", "cap"].includes(kind));
    assert.ok(lengths.length <= 3 && lengths.every((length) => length >= 0 && length <= 9));
  }
  const stream = client().chat.completions.stream(fields);
  JSON.parse((await stream.finalChatCompletion()).choices[0].message.content);
});

test("a rate limit is waited for", async () => {
  const sent = [];
  const sdk = client("TOLLGATE_KEY_RATE", sent);
  for (let i = 0; i < 4; i++) await ask(sdk, { max_tokens: 1 });
  assert.ok(sent.length > 4, `${sent.length} requests sent`);
});

// Repeats a request with its key, like an application that lost the answer.
test("a request with an Idempotency-Key runs once", async () => {
  const once = (key, fields) =>
    client()
      .chat.completions.create(
        { model: MODEL, messages: QUESTION, temperature: 0, max_tokens: 5, ...fields },
        { headers: { "Idempotency-Key": key } },
      )
      .withResponse();
  const first = await once("node-once");
  const again = await once("node-once");
  assert.equal(again.data.id, first.data.id);
  assert.equal(
    again.response.headers.get("x-tollgate-replay-of"),
    first.response.headers.get("x-request-id"),
  );
  assert.equal(first.response.headers.get("x-tollgate-replay-of"), null);
  await assert.rejects(once("node-once", { max_tokens: 6 }), { status: 422 });
});

test("the usage of an answer that was left is exact", async () => {
  const sdk = client();
  const { data: stream, response } = await sdk.chat.completions
    .create({ model: MODEL, messages: QUESTION, stream: true, max_tokens: 400 })
    .withResponse();
  for await (const _ of stream) break;
  const request = response.headers.get("x-request-id");
  let usage = {};
  for (let tries = 0; tries < 200 && usage.state !== "posted"; tries += 1) {
    // The interrupted request may not be in the ledger yet.
    usage = await sdk.get(`/usage/${request}`).catch(() => ({}));
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  assert.equal(usage.state, "posted");
  assert.ok(usage.attributed_ns > 0 && usage.prompt_tokens > 5);
  const sum = usage.entries.reduce((sum, entry) => sum + entry.amount_ns, 0);
  assert.equal(sum, usage.attributed_ns);
});
