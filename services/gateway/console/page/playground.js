// A chat with the model, streamed, with its parameters; and what became of the last answer.
import { useEffect, useRef, useState } from "preact/hooks";

import { ask, askJson } from "./feed.js";
import { count, rate, seconds } from "./format.js";
import { html } from "./html.js";

const PARAMETERS = [
  ["max_tokens", "most tokens", "256", "number", { min: 1, step: 1 }],
  ["temperature", "temperature", "", "number", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "top p", "", "number", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "top k", "", "number", { min: -1, step: 1 }],
  ["seed", "seed", "", "number", { step: 1 }],
  ["frequency_penalty", "frequency penalty", "", "number", { min: -2, max: 2, step: 0.1 }],
  ["presence_penalty", "presence penalty", "", "number", { min: -2, max: 2, step: 0.1 }],
  ["stop", "stop at", "", "text", {}],
];
const TIERS = ["auto", "priority", "flex"];

export function Playground() {
  const [models, setModels] = useState([]);
  const [turns, setTurns] = useState([]);
  const [said, setSaid] = useState({});
  const [draft, setDraft] = useState("");
  const { writing, answer, send, stop } = useAnswer(turns, setTurns);
  useEffect(() => {
    askJson("v1/models").then((found) => setModels(found.data.map((model) => model.id)), () => setModels([]));
  }, []);
  const set = (name) => (event) => setSaid({ ...said, [name]: event.target.value });
  function submit(event) {
    event.preventDefault();
    if (writing || !draft.trim()) return;
    setDraft("");
    send(bodyOf(said, models, turns, draft), draft);
  }
  const typed = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && submit(event);
  return html`<div class="playground">
    <form class="card parameters" onSubmit=${(event) => event.preventDefault()}><h2>Parameters</h2>
      <label>model <select value=${said.model ?? models[0]} onChange=${set("model")}>${models.map((id) => html`<option>${id}</option>`)}</select></label>
      <label>service tier <select value=${said.service_tier ?? "auto"} onChange=${set("service_tier")}>${TIERS.map((id) => html`<option>${id}</option>`)}</select></label>
      <label class="whole">system message <textarea rows="2" value=${said.system ?? ""} onInput=${set("system")}></textarea></label>
      ${PARAMETERS.map(([name, title, usual, type, bounds]) => html`
        <label>${title} <input type=${type} name=${name} placeholder=${usual || "as usual"} value=${said[name] ?? ""} onInput=${set(name)} ...${bounds} /></label>`)}
    </form>
    <section class="card chat"><h2>Chat</h2>
      <${Turns} turns=${turns} writing=${writing} />
      ${answer && html`<${Outcome} answer=${answer} />`}
      <form onSubmit=${submit}>
        <textarea aria-label="Message" rows="3" placeholder="Say something  ( Ctrl Enter sends )" value=${draft}
          onInput=${(event) => setDraft(event.target.value)} onKeyDown=${typed}></textarea>
        <div class="buttons">
          ${writing ? html`<button type="button" onClick=${stop}>Stop</button>` : html`<button type="submit" disabled=${!draft.trim()}>Send</button>`}
          <button type="button" class="quiet" disabled=${writing || !turns.length} onClick=${() => setTurns([])}>Clear</button>
        </div>
      </form>
    </section></div>`;
}

function Turns({ turns, writing }) {
  const end = useRef(null);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [turns]);
  return html`<div class="turns" role="log" aria-live="polite">
    ${turns.map((turn, at) => html`<div class="turn ${turn.role}" key=${at}><b>${turn.role}</b><p>${turn.content}${
      writing && at === turns.length - 1 ? html`<i class="caret"></i>` : ""}</p></div>`)}
    <div ref=${end}></div></div>`;
}

function Outcome({ answer }) {
  if (answer.error) return html`<p class="bad" role="alert">${answer.error}</p>`;
  const { path, reason, requestId, ttft, tokens, tokensPerS } = answer;
  return html`<p class="note">${path} path · first token after ${seconds(ttft)} · ${count(tokens)} tokens${tokensPerS ? `, ${rate(tokensPerS)} a second` : ""} · ${" "}
    <a href="#requests/${encodeURIComponent(requestId)}">its waterfall</a><br /><small>${reason}</small></p>`;
}

/** Only what was said: the gateway knows what is usual. */
function bodyOf(said, models, turns, draft) {
  const messages = [...turns.map(({ role, content }) => ({ role, content })), { role: "user", content: draft }];
  if (said.system) messages.unshift({ role: "system", content: said.system });
  const body = { model: said.model ?? models[0], messages, stream: true, stream_options: { include_usage: true }, max_tokens: 256 };
  for (const [name, , , type] of PARAMETERS) {
    if (said[name]) body[name] = type === "number" ? Number(said[name]) : said[name];
  }
  if (said.service_tier) body.service_tier = said.service_tier;
  return body;
}

function useAnswer(turns, setTurns) {
  const [writing, setWriting] = useState(false);
  const [answer, setAnswer] = useState(null);
  const abort = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);
  async function send(body, draft) {
    const asked = [...turns, { role: "user", content: draft }];
    const began = performance.now();
    let content = "";
    const found = { ttft: null, tokens: null };
    abort.current = new AbortController();
    setWriting(true);
    setAnswer(null);
    setTurns([...asked, { role: "assistant", content }]);
    try {
      const headers = { "content-type": "application/json" };
      const response = await ask("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal: abort.current.signal });
      found.path = response.headers.get("x-tandem-path") ?? "no";
      found.reason = response.headers.get("x-tandem-reason") ?? "";
      found.requestId = response.headers.get("x-request-id") ?? "";
      for await (const event of eventsOf(response.body)) {
        if (event.error) throw new Error(event.error.message);
        const text = event.choices?.[0]?.delta?.content ?? "";
        if (text) found.ttft ??= (performance.now() - began) / 1000;
        found.tokens = event.usage?.completion_tokens ?? found.tokens;
        content += text;
        if (text) setTurns([...asked, { role: "assistant", content }]);
      }
      const writingS = (performance.now() - began) / 1000 - found.ttft;
      setAnswer({ ...found, tokensPerS: found.tokens > 1 ? (found.tokens - 1) / writingS : null });
    } catch (error) {
      const stopped = error.name === "AbortError";
      setAnswer(stopped ? { error: "Stopped." } : { error: error.message });
      if (!content) setTurns(asked.slice(0, stopped ? undefined : -1));
    } finally {
      setWriting(false);
    }
  }
  return { writing, answer, send, stop: () => abort.current?.abort() };
}

/** Server-sent events' data, parsed, until [DONE]. */
export async function* eventsOf(stream) {
  let text = "";
  for await (const chunk of chunksOf(stream.pipeThrough(new TextDecoderStream()))) {
    text += chunk;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function* chunksOf(stream) {
  const reader = stream.getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    reader.cancel();
  }
}
