// OpenAI's own client for Node: chats, completions, Responses in the background, conversations, tools that are run.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "import os" }];
const brief = { model, messages, max_tokens: 24, temperature: 0 };

assert.equal((await client.models.list()).data[0].id, model);
const whole = (await client.chat.completions.create(brief)).choices[0].message.content;
const stream = client.chat.completions.stream(brief);
assert.equal(await stream.finalContent(), whole);
assert.ok(whole);
let text = "";
for await (const part of await client.completions.create({ model, prompt: "import os", stream: true })) {
  text += part.choices[0]?.text ?? "";
}
assert.ok(text);

const Place = z.object({ city: z.literal("Lund") });
const formed = await client.chat.completions.parse({ model, messages, response_format: zodResponseFormat(Place, "place") });
assert.deepEqual(formed.choices[0].message.parsed, { city: "Lund" });

let asked = 0;
const properties = { city: { const: "Lund" } };
const parameters = { type: "object", properties, required: ["city"], additionalProperties: false };
const weather = { name: "weather", parameters, parse: JSON.parse, function: () => `cold ${++asked}` };
const runner = client.chat.completions.runTools({
  model,
  messages,
  response_format: zodResponseFormat(Place, "place"),
  tools: [{ type: "function", function: weather }],
  tool_choice: { type: "function", function: { name: "weather" } },
});
await runner.done();
assert.equal(asked, 1);

const response = { model, input: "import os", max_output_tokens: 24 };
const events = [];
for await (const event of await client.responses.create({ ...response, stream: true })) events.push(event);
assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
let queued = await client.responses.create({ ...response, background: true });
while (["queued", "in_progress"].includes(queued.status)) queued = await client.responses.retrieve(queued.id);
assert.ok(queued.output_text);
const items = [];
for await (const item of client.responses.inputItems.list(queued.id)) items.push(item.type);
assert.deepEqual(items, ["message"]);
assert.ok((await client.responses.create({ ...response, previous_response_id: queued.id })).output_text);
await client.responses.delete(queued.id);
const conversation = await client.conversations.create({ items: [{ type: "message", role: "user", content: "hi" }] });
assert.ok((await client.responses.create({ ...response, conversation: conversation.id })).output_text);
assert.equal((await client.conversations.items.list(conversation.id)).data.length, 3);
assert.ok((await client.conversations.delete(conversation.id)).deleted);
