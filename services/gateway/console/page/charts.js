// Lines over the last minutes, by uPlot, in the page's colours.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";

import { html } from "./html.js";

const HEIGHT = 150;
const GAP_S = 5;
const BRIDGED_S = 12;
const dark = matchMedia("(prefers-color-scheme: dark)");

/** series: {title, value(point), color}, the name of a colour in console.css. show: how a value is read. */
export function Chart({ title, points, now, series, show, top }) {
  const holder = useRef(null);
  const chart = useRef(null);
  useEffect(() => {
    const box = holder.current;
    function build() {
      chart.current?.destroy();
      chart.current = make(box, series, show, top);
      chart.current.setData(data(points, series, now));
    }
    const sized = new ResizeObserver(() => box.clientWidth && chart.current.setSize({ width: box.clientWidth, height: HEIGHT }));
    build();
    sized.observe(box);
    dark.addEventListener("change", build);
    return () => {
      dark.removeEventListener("change", build);
      sized.disconnect();
      chart.current.destroy();
    };
  }, []);
  useEffect(() => chart.current.setData(data(points, series, now)), [points]);
  const last = (value) => points.map(value).findLast((one) => one != null);
  return html`<section class="card chart">
    <h2>${title}</h2>
    <ul class="legend">${series.map(({ title, value, color }) => html`
      <li><i class="dot ${color}"></i>${title} <b>${show(last(value))}</b></li>`)}</ul>
    <div ref=${holder} class="plot" role="img" aria-label=${`${title}, the last ten minutes`}></div>
  </section>`;
}

/** Clock times for the gateway's own; a silence is a gap. */
function data(points, series, now) {
  const begin = Date.now() / 1000 - now;
  const times = [];
  const values = series.map(() => []);
  points.forEach((point, at) => {
    if (at && point.t - points[at - 1].t > GAP_S) {
      times.push(begin + point.t - 1);
      values.forEach((line) => line.push(null));
    }
    times.push(begin + point.t);
    series.forEach(({ value }, number) => values[number].push(value(point) ?? null));
  });
  return [times, ...values.map((line) => bridged(times, line))];
}

/** What was not measured for a moment is drawn over, as undefined is; a longer silence is a gap, as null is. */
function bridged(times, line) {
  let last = -Infinity;
  return line.map((value, at) => {
    if (value != null) {
      last = times[at];
      return value;
    }
    const next = line.findIndex((one, later) => later > at && one != null);
    return next > 0 && times[next] - last < BRIDGED_S ? undefined : null;
  });
}

/** Values between two gaps, which no line reaches. */
function lonely(chart, number) {
  const line = chart.data[number];
  return line.flatMap((value, at) => (value != null && line[at - 1] == null && line[at + 1] == null ? [at] : []));
}

function make(holder, series, show, top) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const axis = { stroke: color("faint"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return new uPlot({
    width: holder.clientWidth || 300, height: HEIGHT, legend: { show: false }, cursor: { y: false, points: { size: 5 } },
    scales: { y: { range: (_, low, high) => [0, top ?? (high > 0 ? high * 1.1 : 1)] } },
    axes: [
      { ...axis, size: 26, space: 70, values: (_, ticks) => ticks.map(clock) },
      { ...axis, size: 56, space: 32, values: (_, ticks) => ticks.map((tick) => show(tick)) },
    ],
    series: [{}, ...series.map((one) => ({
      stroke: color(one.color), width: 1.75, points: { show: true, size: 4, filter: lonely },
    }))],
  }, [[], ...series.map(() => [])], holder);
}

function clock(at) {
  return new Date(1000 * at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
}
