// A table whose columns sort, by mouse and keyboard.
import { useState } from "preact/hooks";

import { html } from "./html.js";

/**
 * columns: {id, title, value(row) to sort by, cell(row), number, wide}; a wide one is left out on a phone.
 * rows: objects; keyOf(row) tells them apart. chosen: the key of one that is marked.
 */
export function Table({ columns, rows, keyOf, sortedBy, label, chosen, empty }) {
  const [order, setOrder] = useState(sortedBy ?? { id: null, down: false });
  const column = columns.find(({ id }) => id === order.id);
  const shown = column ? [...rows].sort(by(column, order.down)) : rows;
  const turn = (id, number) => setOrder({ id, down: order.id === id ? !order.down : Boolean(number) });
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<div class="scroll"><table aria-label=${label}>
    <thead><tr>${columns.map(({ id, title, number, wide }) => html`
      <th scope="col" class=${classes(number, wide)} aria-sort=${order.id === id ? (order.down ? "descending" : "ascending") : undefined}>
        <button onClick=${() => turn(id, number)}>${title}</button></th>`)}</tr></thead>
    <tbody>${shown.map((row) => html`
      <tr key=${keyOf(row)} class=${keyOf(row) === chosen ? "chosen" : ""}>${columns.map(({ cell, value, number, wide }) => html`
        <td class=${classes(number, wide)}>${(cell ?? value)(row)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

function classes(number, wide) {
  return `${number ? "number" : ""} ${wide ? "wide" : ""}`;
}

function by({ value }, down) {
  const sign = down ? -1 : 1;
  return (a, b) => {
    const [x, y] = [value(a) ?? -Infinity, value(b) ?? -Infinity];
    return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
  };
}
