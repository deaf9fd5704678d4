// Ask a running cluster (`make run`) for a chat's answer as it is written, and for JSON of a schema. No packages needed.
//
// node examples/chat.mjs [URL]

const url = process.argv[2] ?? "http://127.0.0.1:8000";
const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 12 }, lines: { type: "integer", minimum: 1, maximum: 999 } },
  required: ["name", "lines"],
  additionalProperties: false,
};

async function ask(path, body) {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(url + path, options);
  if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.json()).error.message}`);
  return answer;
}

async function* events(answer) {
  let held = "";
  for await (const part of answer.body.pipeThrough(new TextDecoderStream())) {
    const lines = (held + part).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

const model = (await (await fetch(`${url}/v1/models`)).json()).data[0].id;
const chat = { model, messages: [{ role: "user", content: "import os" }], max_tokens: 24 };

for await (const event of events(await ask("/v1/chat/completions", { ...chat, stream: true }))) {
  process.stdout.write(event.choices[0]?.delta.content ?? "");
}
console.log();

const response_format = { type: "json_schema", json_schema: { name: "module", schema } };
const whole = await (await ask("/v1/chat/completions", { ...chat, max_tokens: 64, response_format })).json();
console.log(JSON.parse(whole.choices[0].message.content));

for await (const event of events(await ask("/v1/messages", { ...chat, stream: true }))) {
  process.stdout.write(event.delta?.text ?? "");
}
console.log();
