// Vercel's ai: OpenAI's default model (Responses), its chat and completion models, and Anthropic's.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
const once = { maxOutputTokens: 24, maxRetries: 0, prompt: "import os" };
const place = z.object({ city: z.literal("Lund") });

for (const model of [openai(name), openai.chat(name), openai.completion(name), anthropic(name)]) {
  const { text, usage } = await generateText({ model, ...once });
  assert.ok(text && usage.outputTokens, model.provider);
  let streamed = "";
  for await (const part of streamText({ model, ...once, onError: ({ error }) => { throw error; } }).textStream) streamed += part;
  assert.ok(streamed, model.provider);
}
for (const model of [openai(name), openai.chat(name), anthropic(name)]) {
  const { output } = await generateText({ model, prompt: "Where?", maxRetries: 0, output: Output.object({ schema: place }) });
  assert.deepEqual(output, { city: "Lund" }, model.provider);
  const asked = [];
  const weather = tool({ inputSchema: place, execute: ({ city }) => { asked.push(city); return "cold"; } });
  await generateText({
    model, ...once, maxOutputTokens: 64, tools: { weather }, stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "weather" } }),
  });
  assert.deepEqual(asked, ["Lund"], model.provider);
}
