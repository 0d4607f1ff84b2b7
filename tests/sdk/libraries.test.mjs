// The Vercel AI SDK, unmodified: texts, streams, objects under a schema, and calls of tools.

import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { test } from 'node:test';
import { pathToFileURL } from 'node:url';

const require = createRequire(join(process.env.TOLLGATE_LIBRARIES_NODE, 'index.js'));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } =
  await load('ai');
const { createOpenAI } = await load('@ai-sdk/openai');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
const { z } = await load('zod');

const settings = {
  baseURL: `${process.env.TOLLGATE_URL}/v1`,
  apiKey: process.env.TOLLGATE_KEY,
};
const compatible = createOpenAICompatible({
  ...settings,
  name: 'tollgate',
  supportsStructuredOutputs: true,
});
const models = {
  compatible: compatible('tollgate-demo'),
  openai: createOpenAI(settings).chat('tollgate-demo'),
};
const Answer = z.object({ answer: z.string().max(40) });
const prompt = 'What is the capital of France?';
const tools = {
  get_limit: tool({
    description: 'Returns a limit of the caller.',
    inputSchema: z.object({ name: z.enum(['requests', 'tokens', 'device_time', 'concurrent']) }),
    execute: async () => '60 requests a minute',
  }),
};

for (const [name, model] of Object.entries(models)) {
  test(`${name}: text and stream`, async () => {
    const { text } = await generateText({ model, prompt: 'What is 2 plus 2?' });
    assert.match(text, /4/);
    let streamed = '';
    for await (const piece of streamText({ model, prompt: 'What is 2 plus 2?' }).textStream) {
      streamed += piece;
    }
    assert.equal(streamed, text);
  });

  test(`${name}: objects`, async () => {
    const { object } = await generateObject({ model, schema: Answer, prompt });
    Answer.parse(object);
    const stream = streamObject({ model, schema: Answer, prompt });
    for await (const part of stream.partialObjectStream) assert.equal(typeof part, 'object');
    Answer.parse(await stream.object);
  });

  test(`${name}: tools`, async () => {
    const question = 'What is my request limit?';
    const loop = { model, tools, prompt: question, stopWhen: stepCountIs(3) };
    const { steps, text } = await generateText(loop);
    assert.equal(steps[0].toolCalls[0].toolName, 'get_limit');
    assert.match(text, /requests a minute/);
    const forced = await generateText({ model, tools, prompt: question, toolChoice: 'required' });
    assert.equal(forced.toolCalls[0].toolName, 'get_limit');
    const output = Output.object({ schema: Answer });
    const both = await generateText({ model, tools, output, prompt, stopWhen: stepCountIs(3) });
    Answer.parse(both.output);
  });
}
