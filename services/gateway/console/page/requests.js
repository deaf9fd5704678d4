// Requests that run and those that ended last, and the waterfall of one.
import { useEffect, useState } from "preact/hooks";

import { askJson } from "./feed.js";
import { NONE, bytes, count, rate, seconds } from "./format.js";
import { html } from "./html.js";
import { Table } from "./table.js";
import { Waterfall } from "./waterfall.js";

export function Requests({ feed, place }) {
  const [filter, setFilter] = useState("");
  const id = place.join("/");
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (r) => Object.values(r).join(" ").toLowerCase();
  const matches = (row) => words.every((word) => text(row).includes(word));
  return html`
    ${id && html`<${One} key=${id} id=${id} record=${feed.requests.find((row) => row.request_id === id)} />`}
    <section class="card"><h2>Running</h2>
      <${Table} label="Running requests" columns=${running(feed.all)} rows=${feed.running.filter(matches)}
        keyOf=${(row) => row.request_id} empty="None runs." /></section>
    <section class="card"><div class="head"><h2>Ended last</h2>
        <input data-filter type="search" placeholder="filter: worker, outcome …  ( / )" aria-label="Filter requests"
          value=${filter} onInput=${(event) => setFilter(event.target.value)} /></div>
      <${Table} label="Requests that ended" columns=${ended(feed.all)} rows=${feed.requests.filter(matches)} chosen=${id}
        keyOf=${(row) => row.request_id} empty="None has ended yet." /></section>`;
}

const name = { id: "id", title: "request", value: (r) => r.request_id, cell: (r) => html`
  <a href="#requests/${encodeURIComponent(r.request_id)}">${r.request_id}</a>` };
const tenant = { id: "tenant", title: "tenant", wide: true, value: (r) => r.tenant || NONE };

function running(all) {
  return [
    name,
    ...(all ? [tenant] : []),
    { id: "class", title: "class", wide: true, value: (r) => r.class },
    { id: "phase", title: "phase", value: (r) => r.phase },
    { id: "age", title: "for", number: true, value: (r) => r.age_s, cell: (r) => seconds(r.age_s) },
    { id: "prompt", title: "prompt", number: true, value: (r) => r.prompt_tokens, cell: (r) => count(r.prompt_tokens) },
    { id: "tokens", title: "tokens", number: true, value: (r) => r.tokens, cell: (r) => count(r.tokens) },
    { id: "workers", title: "workers", wide: true, value: pair },
  ];
}

function ended(all) {
  return [
    name,
    ...(all ? [tenant] : []),
    { id: "ago", title: "ago", number: true, value: (r) => r.ago_s, cell: (r) => seconds(r.ago_s) },
    { id: "outcome", title: "outcome", value: (r) => r.status, cell: (r) => html`
      <span class="pill ${r.status < 400 ? "good" : r.status < 500 ? "warn" : "bad"}">${r.status} ${r.outcome}</span>` },
    { id: "path", title: "path", wide: true, value: (r) => r.path ?? NONE, cell: (r) => html`<span title=${r.path_reason}>${r.path ?? NONE}</span>` },
    { id: "ttft", title: "TTFT", number: true, value: (r) => r.ttft_s, cell: (r) => seconds(r.ttft_s) },
    { id: "itl", title: "ITL p99", number: true, wide: true, value: (r) => r.itl_p99_s, cell: (r) => seconds(r.itl_p99_s) },
    { id: "prompt", title: "prompt", number: true, wide: true, value: (r) => r.prompt_tokens, cell: (r) => count(r.prompt_tokens) },
    { id: "cached", title: "cached", number: true, wide: true, value: (r) => r.cached_tokens, cell: (r) => count(r.cached_tokens) },
    { id: "tokens", title: "tokens", number: true, value: (r) => r.output_tokens, cell: (r) => count(r.output_tokens) },
    { id: "rate", title: "tokens/s", number: true, wide: true, value: (r) => r.tokens_per_s, cell: (r) => rate(r.tokens_per_s) },
    { id: "moved", title: "KV moved", number: true, wide: true, value: (r) => r.transfer_bytes, cell: (r) => bytes(r.transfer_bytes) },
    { id: "whole", title: "took", number: true, value: (r) => r.whole_s, cell: (r) => seconds(r.whole_s) },
    { id: "workers", title: "workers", wide: true, value: pair },
  ];
}

function pair(row) {
  return [row.prefill_worker, row.decode_worker].filter(Boolean).join(" → ") || NONE;
}

function One({ id, record }) {
  const [trace, setTrace] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    let left = false;
    setError(null);
    askJson(`debug/traces/${encodeURIComponent(id)}`).then(
      (found) => left || setTrace(found),
      (refused) => left || setError(refused),
    );
    return () => {
      left = true;
    };
  }, [id, record !== undefined]);
  return html`<section class="card"><div class="head"><h2>Request <code>${id}</code></h2><a href="#requests">close</a></div>
    ${record?.path_reason && html`<p class="note">${record.path_reason}</p>`}
    ${trace ? html`<${Waterfall} trace=${trace} />`
      : error ? html`<p class="note">${error.message}. A trace is kept of the latest requests, and of at most so many a second.</p>`
        : html`<p class="note">Asking for its trace …</p>`}
    ${record && html`<details><summary>Record</summary><dl class="record">${Object.entries(record).map(([field, value]) => html`
      <dt>${field}</dt><dd>${Array.isArray(value) ? value.join(", ") : String(value)}</dd>`)}</dl></details>`}
  </section>`;
}
