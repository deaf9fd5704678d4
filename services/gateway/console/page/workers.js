// Workers and the KV links between them.
import { useState } from "preact/hooks";

import { NONE, bytes, count, percent, rate, seconds } from "./format.js";
import { html } from "./html.js";
import { Table } from "./table.js";

const GOOD = { serving: "good", draining: "warn", stuck: "bad", "no answer": "bad" };

export function Workers({ feed, place }) {
  const [filter, setFilter] = useState("");
  if (!feed.all) return html`<p class="note">Workers are shown to keys with <code>manages_models</code>.</p>`;
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (w) => `${w.id} ${w.role} ${w.state} ${w.model} ${w.host} ${w.incarnation}`.toLowerCase();
  const shown = feed.workers.filter((worker) => words.every((word) => text(worker).includes(word)));
  const chosen = feed.workers.find((worker) => worker.id === place[0]);
  const left = feed.num_workers - feed.workers.length;
  return html`<${Map} workers=${feed.workers} chosen=${chosen?.id} />
    <section class="card">
      <div class="head"><h2>${count(shown.length)} of ${count(feed.num_workers)} workers</h2>
        <input data-filter type="search" placeholder="filter: role, state, host …  ( / )" aria-label="Filter workers"
          value=${filter} onInput=${(event) => setFilter(event.target.value)} /></div>
      ${left > 0 && html`<p class="note">${left} more are not shown.</p>`}
      <${Table} label="Workers" columns=${columns(feed)} rows=${shown} keyOf=${(row) => row.id} chosen=${chosen?.id}
        sortedBy=${{ id: "id", down: false }} empty="No worker." />
    </section>
    <${Links} feed=${feed} worker=${chosen} />`;
}

function columns(feed) {
  const decodes = feed.workers.filter((worker) => worker.role === "decode").length;
  return [
    { id: "id", title: "worker", value: (w) => w.id, cell: (w) => html`<a href="#workers/${encodeURIComponent(w.id)}">${w.id}</a>` },
    { id: "state", title: "state", value: (w) => w.state, cell: (w) => html`<span class="pill ${GOOD[w.state]}">${w.state}</span>` },
    { id: "kv", title: "KV", number: true, value: (w) => w.kv, cell: (w) => html`<meter min="0" max="1" high="0.9" value=${w.kv}></meter> <span class="share">${percent(w.kv)}</span>` },
    { id: "running", title: "running", number: true, value: (w) => w.running, cell: (w) => count(w.running) },
    { id: "waiting", title: "waiting", number: true, value: (w) => w.waiting, cell: (w) => count(w.waiting) },
    { id: "queued", title: "queued tokens", number: true, wide: true, value: (w) => w.queued_tokens, cell: (w) => count(w.queued_tokens) },
    { id: "rate", title: "tokens/s", number: true, value: (w) => w.tokens_per_s, cell: (w) => w.tokens_per_s ? rate(w.tokens_per_s) : NONE },
    { id: "step", title: "step", number: true, wide: true, value: (w) => w.step_s, cell: (w) => w.step_s ? seconds(w.step_s) : NONE },
    { id: "links", title: "links", number: true, value: (w) => w.linked, cell: (w) => w.role === "prefill" ? `${w.linked} of ${decodes}` : "" },
    { id: "host", title: "host", wide: true, value: (w) => w.host },
    { id: "incarnation", title: "incarnation", wide: true, value: (w) => w.incarnation, cell: (w) => html`<code title=${w.incarnation}>${w.incarnation.slice(0, 12)}</code>` },
  ];
}

/** One cell a worker: as full as its KV, edged by its state. */
function Map({ workers, chosen }) {
  const groups = ["prefill", "decode"].map((role) => [role, workers.filter((worker) => worker.role === role)]);
  return html`<section class="card"><h2>At a glance</h2>${groups.map(([role, members]) => html`
    <div class="map"><span>${role}</span><div class="cells">${members.map((w) => html`
      <a key=${w.id} href="#workers/${encodeURIComponent(w.id)}" class="cell ${GOOD[w.state]} ${w.id === chosen ? "chosen" : ""}"
        title="${w.id}: ${w.state}, KV ${percent(w.kv)}, ${w.running} running" aria-label="${w.id}, ${w.state}">
        <i style=${{ height: `${Math.round(100 * w.kv)}%` }}></i></a>`)}</div></div>`)}</section>`;
}

function Links({ feed, worker }) {
  const touches = (link) => !worker || link.prefill === worker.id || link.decode === worker.id;
  const rows = feed.links.filter(touches);
  const shown = rows.slice(0, 200);
  const list = [
    { id: "prefill", title: "from", value: (l) => l.prefill },
    { id: "decode", title: "to", value: (l) => l.decode },
    { id: "state", title: "state", value: (l) => (l.up ? "up" : "down"), cell: (l) => html`
      <span class="pill ${l.up ? "good" : "bad"}" title=${l.refused}>${l.up ? "up" : l.refused || "down"}</span>` },
    { id: "transport", title: "transport", value: (l) => `${l.transport} ${l.carrier}`.trim() || NONE },
    { id: "speed", title: "bandwidth", number: true, value: (l) => l.bytes_per_s, cell: (l) => l.bytes_per_s ? `${bytes(l.bytes_per_s)}/s` : NONE },
    { id: "bytes", title: "moved", number: true, value: (l) => l.bytes, cell: (l) => bytes(l.bytes) },
    { id: "transfers", title: "transfers", number: true, wide: true, value: (l) => l.transfers, cell: (l) => count(l.transfers) },
    { id: "failures", title: "failed", number: true, wide: true, value: (l) => l.failures, cell: (l) => count(l.failures) },
    { id: "incarnation", title: "incarnation", wide: true, value: (l) => l.incarnation, cell: (l) => html`<code title=${l.incarnation}>${l.incarnation.slice(0, 12)}</code>` },
  ];
  const title = worker ? `Links of ${worker.id}` : "Links";
  return html`<section class="card"><div class="head"><h2>${title}</h2>
      ${worker && html`<a href="#workers">of all workers</a>`}</div>
    ${rows.length > shown.length && html`<p class="note">${shown.length} of ${count(rows.length)}: choose a worker for its own.</p>`}
    <${Table} label=${title} columns=${list} rows=${shown} keyOf=${(l) => `${l.prefill} ${l.decode}`} empty="No link." />
    <p class="note">Bandwidth is of KV that was verified, by the time that pushing it took beside computing it.</p></section>`;
}
