// The page: which view is shown, and the key. Keys 1 to 4 change the view, / goes to the filter, ? shows this.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { apiKey, keepKey, useFeed } from "./feed.js";
import { html } from "./html.js";
import { Overview } from "./overview.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { Workers } from "./workers.js";

const VIEWS = [
  ["overview", "Overview", Overview],
  ["workers", "Workers", Workers],
  ["requests", "Requests", Requests],
  ["playground", "Playground", Playground],
];

function usePlace() {
  const read = () => decodeURIComponent(location.hash.slice(1)).split("/");
  const [place, setPlace] = useState(read);
  useEffect(() => {
    const moved = () => setPlace(read());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return place;
}

function useKeys(showHelp) {
  useEffect(() => {
    function pressed(event) {
      const typing = event.target.closest?.("input, textarea, select");
      if (event.key === "Escape") {
        showHelp(false);
        event.target.blur?.();
      }
      if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
      const view = VIEWS[Number(event.key) - 1];
      if (view) location.hash = view[0];
      else if (event.key === "?") showHelp(true);
      else if (event.key === "/") {
        event.preventDefault();
        document.querySelector("[data-filter]")?.focus();
      }
    }
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

function KeyForm({ error, restart }) {
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  function use(event) {
    event.preventDefault();
    keepKey(field.current.value.trim());
    restart();
  }
  return html`<form class="key card" onSubmit=${use}>
    <h1>API key</h1>
    <p>This gateway asks for one. It is kept in this tab until you close it.</p>
    <label for="key">Key</label>
    <input id="key" ref=${field} type="password" autocomplete="off" placeholder="tk-…" />
    ${apiKey() && html`<p class="bad" role="alert">${error.message}</p>`}
    <button type="submit">Use this key</button>
  </form>`;
}

function Help({ close }) {
  const rows = [["1 – 4", "views"], ["/", "filter"], ["Tab, Enter", "rows and bars"], ["Ctrl Enter", "send a message"],
    ["Esc", "leave a field, close this"]];
  return html`<div class="help card" role="dialog" aria-label="Keys">
    <dl>${rows.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl>
    <button onClick=${close}>Close</button>
  </div>`;
}

function State({ feed, error }) {
  if (error) return html`<span class="pill bad" role="status">${feed ? "no answer" : "not connected"}</span>`;
  if (!feed) return html`<span class="pill" role="status">connecting</span>`;
  if (!feed.all) return html`<span class="pill" role="status">tenant ${feed.tenant}</span>`;
  const { ready, missing, registry_reached, warnings = [] } = feed.gateway;
  if (!ready) return html`<span class="pill bad" role="status" title=${missing.join("; ")}>not ready</span>`;
  if (!registry_reached) return html`<span class="pill warn" role="status">registry lost</span>`;
  if (warnings.length > 0) {
    return html`<span class="pill warn" role="status" title=${warnings.join("; ")}>ready, with a warning</span>`;
  }
  return html`<span class="pill good" role="status">ready</span>`;
}

function Page() {
  const { feed, points, error, restart } = useFeed();
  const [help, showHelp] = useState(false);
  const [view, ...rest] = usePlace();
  useKeys(showHelp);
  const [name, , View] = VIEWS.find(([name]) => name === view) ?? VIEWS[0];
  function forget() {
    keepKey("");
    restart();
  }
  const body = error?.status === 401
    ? html`<${KeyForm} error=${error} restart=${restart} />`
    : !feed
      ? html`<p class="empty" role="status">${error ? error.message : "Connecting …"}</p>`
      : html`<${View} feed=${feed} points=${points} place=${rest} />`;
  return html`
    <header>
      <a class="brand" href="#overview"><img src="console/files/icon.svg" alt="" width="22" height="22" /> Tandem</a>
      <nav aria-label="Views">
        ${VIEWS.map(([id, title], at) => html`
          <a href="#${id}" aria-current=${id === name ? "page" : undefined} title="key ${at + 1}">${title}</a>`)}
      </nav>
      <span class="where">${feed?.gateway?.model ?? ""}</span>
      <${State} feed=${feed} error=${error} />
      ${apiKey() && html`<button class="quiet" onClick=${forget}>Forget key</button>`}
      <button class="quiet" title="Keys" aria-label="Keys" onClick=${() => showHelp(!help)}>?</button>
    </header>
    ${help && html`<${Help} close=${() => showHelp(false)} />`}
    <main>${body}</main>`;
}

render(html`<${Page} />`, document.getElementById("console"));
