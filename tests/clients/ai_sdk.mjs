// Vercel's AI SDK against a server: text, streams, tools, objects, with both APIs.
// Usage: node ai_sdk.mjs ADDRESS
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "adafuse",
  baseURL,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const models = {
  responses: openai("adafuse"),
  chat: openai.chat("adafuse"),
  compatible: compatible("adafuse"),
};

for (const [name, model] of Object.entries(models)) {
  const seen = [];
  const calculate = tool({
    description: "Compute a number.",
    inputSchema: z.object({ expression: z.string() }),
    execute: async ({ expression }) => {
      seen.push(expression);
      return "1364";
    },
  });
  const settings = { model, maxOutputTokens: 200, maxRetries: 0 };
  const hello = await generateText({ ...settings, prompt: "Hello!" });
  assert.equal(hello.text, "Good day.", name);
  assert.ok(hello.usage.outputTokens > 0, name);

  const stream = streamText({ ...settings, prompt: "Hello!" });
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, "Good day.", name);

  const agent = { ...settings, tools: { calculate }, stopWhen: stepCountIs(3) };
  const answer = await generateText({ ...agent, prompt: "What is 31 * 44?" });
  assert.equal(answer.text, "It is 1364.", name);
  assert.deepEqual(seen, ["31 * 44"], name);
  const followed = streamText({ ...agent, prompt: "What is 31 * 44?" });
  await followed.consumeStream();
  assert.equal(await followed.text, "It is 1364.", name);

  const price = await generateText({
    ...settings,
    prompt: "What is the price?",
    output: Output.object({ schema: z.object({ florins: z.number().int() }) }),
  });
  assert.deepEqual(price.output, { florins: 4 }, name);
}
console.log("done");
