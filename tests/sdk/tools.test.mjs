// Tools with the unmodified `openai` Node SDK, on a model whose calls are required.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";

const require = createRequire(process.env.TOLLGATE_NODE_MODULES + "/");
const { OpenAI } = require("openai");

const MODEL = "tollgate-demo";
const client = () =>
  new OpenAI({ baseURL: process.env.TOLLGATE_URL + "/v1", apiKey: process.env.TOLLGATE_KEY });
const parameters = {
  type: "object",
  properties: { plan: { type: "string", enum: ["team", "trial"] } },
  required: ["plan"],
  additionalProperties: false,
};
const fields = {
  model: MODEL,
  messages: [{ role: "user", content: "What is the limit of plan team?" }],
  max_tokens: 200,
};

test("runTools calls the function with whole arguments", async () => {
  const seen = [];
  const runner = client().chat.completions.runTools({
    ...fields,
    tool_choice: { type: "function", function: { name: "get_limit" } },
    tools: [
      {
        type: "function",
        function: {
          name: "get_limit",
          description: "Returns the limit of a plan.",
          parameters,
          parse: JSON.parse,
          function: (asked) => {
            seen.push(asked);
            return "600 requests a minute";
          },
        },
      },
    ],
  });
  await runner.done();
  assert.equal(seen.length, 1);
  assert.ok(["team", "trial"].includes(seen[0].plan));
});

test("a stream of calls has whole arguments", async () => {
  const stream = client().chat.completions.stream({
    ...fields,
    tool_choice: "required",
    parallel_tool_calls: false,
    tools: [{ type: "function", function: { name: "get_limit", parameters } }],
  });
  const choice = (await stream.finalChatCompletion()).choices[0];
  assert.equal(choice.finish_reason, "tool_calls");
  const [call] = choice.message.tool_calls;
  assert.equal(call.function.name, "get_limit");
  assert.ok(["team", "trial"].includes(JSON.parse(call.function.arguments).plan));
});
