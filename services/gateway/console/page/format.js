// Numbers as people read them. What is not known is a dash.
export const NONE = "–";

export function count(value) {
  return value == null ? NONE : Math.round(value).toLocaleString("en");
}

export function percent(share) {
  return share == null ? NONE : `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;
}

export function seconds(value) {
  if (value == null) return NONE;
  if (!value) return "0";
  if (value < 0.0009995) return `${(1e6 * value).toFixed(0)} µs`;
  if (value < 0.9995) return `${(1e3 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

export function bytes(value) {
  if (value == null) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${value.toFixed(at && value < 10 ? 1 : 0)} ${units[at]}`;
}

export function rate(value, unit = "") {
  return value == null ? NONE : `${value < 10 ? +value.toFixed(1) : count(value)}${unit}`;
}
