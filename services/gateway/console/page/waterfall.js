// One request's time: the rows of its processes, each with bars that took a while and marks that did not.
import { useState } from "preact/hooks";

import { seconds } from "./format.js";
import { html } from "./html.js";

const TICKS = [0, 0.25, 0.5, 0.75, 1];
const MAX_MARKS = 600;

export function Waterfall({ trace }) {
  const [told, tell] = useState(null);
  const rows = trace.rows;
  const ends = rows.flatMap((row) => [...row.bars.map((bar) => bar.at + bar.took), ...row.marks]);
  const begin = Math.min(0, ...rows.flatMap((row) => row.bars.map((bar) => bar.at)));
  const span = Math.max(1, Math.max(...ends) - begin);
  const at = (us) => `${((100 * (us - begin)) / span).toFixed(3)}%`;
  return html`<div class="waterfall">
    <div class="row axis"><span></span><div class="lane">${TICKS.map((part) => html`
      <span style=${{ left: `${100 * part}%` }}>${seconds((begin + part * span) / 1e6)}</span>`)}</div></div>
    ${rows.map((row, number) => html`
      ${row.process !== rows[number - 1]?.process && html`<h3 key=${`process ${row.process}`}>${row.process}</h3>`}
      <${Row} key=${number} row=${row} at=${at} span=${span} tell=${tell} />`)}
    ${trace.missing.length > 0 && html`<p class="note">Without the spans of ${trace.missing.join(", ")}: gone, or not recorded there.</p>`}
    ${told && html`<${Told} bar=${told} />`}
  </div>`;
}

function Row({ row, at, span, tell }) {
  const bars = row.bars.map((bar) => {
    const failed = bar.args.error ? "failed" : "";
    const label = `${bar.name}, at ${seconds(bar.at / 1e6)} for ${seconds(bar.took / 1e6)}`;
    return html`<button class="bar ${kind(bar.name)} ${failed}" title=${label} aria-label=${label} onClick=${() => tell(bar)} onFocus=${() => tell(bar)}
      style=${{ left: at(bar.at), width: `${Math.max(0.05, (100 * bar.took) / span).toFixed(3)}%` }}></button>`;
  });
  const marks = row.marks.slice(0, MAX_MARKS).map((mark) => html`
    <i class="mark" title="${row.name}, at ${seconds(mark / 1e6)}" style=${{ left: at(mark) }}></i>`);
  const took = row.bars.length === 1 ? seconds(row.bars[0].took / 1e6) : `${row.bars.length + row.marks.length} ×`;
  return html`<div class="row"><span title=${row.name}>${row.name} <small>${took}</small></span>
    <div class="lane">${bars}${marks}</div></div>`;
}

/** Of a span its own name, of a chunk or push what it is. */
function kind(name) {
  if (name.startsWith("layer ")) return "push";
  if (name.startsWith("chunk ")) return "chunk";
  return name.replace(/\W/g, "-");
}

function Told({ bar }) {
  return html`<div class="told" role="status"><b>${bar.name}</b> at ${seconds(bar.at / 1e6)}, ${seconds(bar.took / 1e6)} long
    <dl class="record">${Object.entries(bar.args).map(([name, value]) => html`<dt>${name}</dt><dd>${Array.isArray(value) ? value.join(", ") : String(value)}</dd>`)}</dl></div>`;
}
