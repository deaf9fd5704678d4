// How the cluster fares: figures, charts, and who waits.
import { Chart } from "./charts.js";
import { count, percent, rate, seconds } from "./format.js";
import { html } from "./html.js";
import { Table } from "./table.js";

const CLASSES = [["realtime", "c3"], ["interactive", "c1"], ["batch", "c2"]];

export function Overview({ feed, points }) {
  if (!feed.all) {
    return html`<p class="note">Figures of the whole cluster need a key with <code>manages_models</code>. These are yours.</p>
      <${Queue} feed=${feed} />`;
  }
  const charts = [
    { title: "Time to first token", show: seconds, series: [line("p50", "c1", "ttft_p50"), line("p95", "c2", "ttft_p95")] },
    { title: "Between tokens", show: seconds, series: [line("p50", "c1", "itl_p50"), line("p99", "c2", "itl_p99")] },
    { title: "Tokens a second", show: rate, series: [line("all", "c1", "tokens_per_s"), line("goodput", "c3", "goodput_per_s")] },
    { title: "Waiting, by class", show: rate, series: CLASSES.map(([name, color]) => ({ title: name, color, value: (p) => p.queued[name] })) },
    { title: "KV in use", show: percent, top: 1, series: [line("decode workers", "c1", "kv")] },
    { title: "Requests", show: rate, series: [line("running", "c1", "running"), line("ended a second", "c2", "requests_per_s")] },
  ];
  return html`<${Tiles} feed=${feed} points=${points} />
    <div class="charts">${charts.map((chart) => html`<${Chart} key=${chart.title} ...${chart} points=${points} now=${feed.now} />`)}</div>
    <${Queue} feed=${feed} />`;
}

function line(title, color, name) {
  return { title, color, value: (point) => point[name] };
}

function Tiles({ feed, points }) {
  const last = points[points.length - 1] ?? {};
  const latest = (name) => points.findLast((point) => point[name] != null)?.[name];
  const down = feed.workers.filter((worker) => worker.state !== "serving").length;
  const lost = feed.links.filter((link) => !link.up).length;
  const tiles = [
    ["Tokens a second", rate(last.tokens_per_s), ""],
    ["TTFT p95", seconds(latest("ttft_p95")), ""],
    ["ITL p99", seconds(latest("itl_p99")), ""],
    ["In time", percent(latest("met")), "by class targets"],
    ["Running", count(feed.running.length && last.running), ""],
    ["KV in use", percent(last.kv), ""],
    ["Workers", count(feed.num_workers), down ? `${down} not serving` : "all serving", down],
    ["Links", `${feed.links.length - lost} of ${feed.links.length}`, lost ? `${lost} down` : "up", lost],
  ];
  return html`<dl class="tiles">${tiles.map(([title, value, note, bad]) => html`
    <div class="card tile"><dt>${title}</dt><dd>${value}</dd><small class=${bad ? "bad" : ""}>${note}</small></div>`)}</dl>`;
}

function Queue({ feed }) {
  const columns = [
    { id: "class", title: "class", value: (row) => row.class },
    { id: "tenant", title: "tenant", value: (row) => row.tenant || "(none)" },
    { id: "waiting", title: "waiting", number: true, value: (row) => row.waiting, cell: (row) => count(row.waiting) },
    { id: "tokens", title: "tokens that wait", number: true, value: (row) => row.tokens, cell: (row) => count(row.tokens) },
    { id: "inside", title: "in the cluster", number: true, value: (row) => row.inside, cell: (row) => count(row.inside) },
  ];
  return html`<section class="card"><h2>Queue, by class and tenant</h2>
    <${Table} label="Queue" columns=${columns} rows=${feed.queue} keyOf=${(row) => `${row.class} ${row.tenant}`}
      empty="Nothing waits, and nothing runs." /></section>`;
}
