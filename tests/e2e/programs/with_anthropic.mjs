// Anthropic's own client for Node: messages, streams, counts, and its tool runner.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "import os" }];
const brief = { model, messages, max_tokens: 24 };

assert.equal((await client.models.list()).data[0].id, model);
const whole = await client.messages.create({ ...brief, temperature: 0 });
assert.ok(whole.content[0].text);
const streamed = await client.messages.stream({ ...brief, temperature: 0 }).finalMessage();
assert.equal(streamed.content[0].text, whole.content[0].text);
const { input_tokens } = await client.messages.countTokens({ model, messages });
assert.equal(input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);

const input_schema = { type: "object", properties: { city: { const: "Lund" } }, required: ["city"], additionalProperties: false };
let asked = 0;
const weather = { type: "custom", name: "weather", input_schema, parse: (said) => said, run: () => `cold ${++asked}` };
const runner = client.beta.messages.toolRunner({
  ...brief, max_tokens: 64, tools: [weather], tool_choice: { type: "tool", name: "weather" }, max_iterations: 2,
});
for await (const message of runner) assert.equal(message.content[0].input.city, "Lund");
assert.ok(asked >= 1);
