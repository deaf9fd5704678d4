// One request's time, from Chrome's trace events as `tandem trace` writes them: a row a span, chunks and pushes on rows of
// their own beneath the worker's that sent them.
import { useState } from "preact/hooks";

import { seconds } from "./format.js";
import { html } from "./html.js";

const TICKS = [0, 0.25, 0.5, 0.75, 1];
const MAX_MARKS = 600;

/** Rows by process, in the order of their begin; what shares a track of chunks or pushes shares a row. */
export function rowsOf(events) {
  const slices = events.filter((event) => event.ph === "X");
  const names = new Map(events.filter((e) => e.name === "process_name").map((e) => [e.pid, e.args.name]));
  const tracks = new Map(events.filter((e) => e.name === "thread_name").map((e) => [`${e.pid} ${e.tid}`, e.args.name]));
  const rows = new Map();
  const add = (key, pid, name, event) => {
    if (!rows.has(key)) rows.set(key, { key, pid, name, process: names.get(pid), bars: [], marks: [] });
    return rows.get(key)[event.ph === "X" ? "bars" : "marks"].push(event);
  };
  for (const event of slices.toSorted((a, b) => a.ts - b.ts || b.dur - a.dur)) {
    const track = tracks.get(`${event.pid} ${event.tid}`);
    if (track === "spans") add(event.args.span_id, event.pid, event.name, event);
    else add(`${event.pid} ${event.tid}`, event.pid, track, event);
  }
  for (const event of events.filter((one) => one.ph === "i")) add(`${event.pid} ${event.name}`, event.pid, event.name, event);
  return [...rows.values()].toSorted((a, b) => a.pid - b.pid);
}

export function Waterfall({ trace }) {
  const [told, tell] = useState(null);
  const rows = rowsOf(trace.traceEvents);
  const ends = rows.flatMap((row) => [...row.bars.map((bar) => bar.ts + bar.dur), ...row.marks.map((mark) => mark.ts)]);
  const begin = Math.min(0, ...rows.flatMap((row) => row.bars.map((bar) => bar.ts)));
  const span = Math.max(1, Math.max(...ends) - begin);
  const at = (us) => `${((100 * (us - begin)) / span).toFixed(3)}%`;
  const missing = trace.otherData.missing ?? [];
  return html`<div class="waterfall">
    <div class="row axis"><span></span><div class="lane">${TICKS.map((part) => html`
      <span style=${{ left: `${100 * part}%` }}>${seconds((begin + part * span) / 1e6)}</span>`)}</div></div>
    ${rows.map((row, number) => html`
      ${row.process !== rows[number - 1]?.process && html`<h3 key=${`process ${row.pid}`}>${row.process}</h3>`}
      <${Row} key=${row.key} row=${row} at=${at} span=${span} tell=${tell} />`)}
    ${missing.length > 0 && html`<p class="note">Without the spans of ${missing.join(", ")}: gone, or not recorded there.</p>`}
    ${told && html`<${Told} event=${told} />`}
  </div>`;
}

function Row({ row, at, span, tell }) {
  const bars = row.bars.map((bar) => {
    const failed = bar.args.error ? "failed" : "";
    const label = `${bar.name}, at ${seconds(bar.ts / 1e6)} for ${seconds(bar.dur / 1e6)}`;
    return html`<button class="bar ${kind(bar.name)} ${failed}" title=${label} aria-label=${label} onClick=${() => tell(bar)} onFocus=${() => tell(bar)}
      style=${{ left: at(bar.ts), width: `${Math.max(0.05, (100 * bar.dur) / span).toFixed(3)}%` }}></button>`;
  });
  const marks = row.marks.slice(0, MAX_MARKS).map((mark) => html`
    <i class="mark" title="${mark.name}, at ${seconds(mark.ts / 1e6)}" style=${{ left: at(mark.ts) }}></i>`);
  const took = row.bars.length === 1 ? seconds(row.bars[0].dur / 1e6) : `${row.bars.length + row.marks.length} ×`;
  return html`<div class="row"><span title=${row.name}>${row.name} <small>${took}</small></span>
    <div class="lane">${bars}${marks}</div></div>`;
}

/** Of a span its own name, of a chunk or push what it is. */
function kind(name) {
  if (name.startsWith("layer ")) return "push";
  if (name.startsWith("chunk ")) return "chunk";
  return name.replace(/\W/g, "-");
}

function Told({ event }) {
  const said = Object.entries(event.args).filter(([name]) => name !== "span_id");
  return html`<div class="told" role="status"><b>${event.name}</b> at ${seconds(event.ts / 1e6)}, ${seconds(event.dur / 1e6)} long
    <dl class="record">${said.map(([name, value]) => html`<dt>${name}</dt><dd>${Array.isArray(value) ? value.join(", ") : String(value)}</dd>`)}</dl></div>`;
}
