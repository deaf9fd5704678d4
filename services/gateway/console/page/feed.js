// All that the page asks of its gateway, with the viewer's API key, which is kept for this tab alone.
import { useEffect, useRef, useState } from "preact/hooks";

const KEY = "tandem-api-key";
const EVERY_MS = 1000;
const AGAIN_MS = 3000;
const WAIT_MS = 10000;
const MAX_POINTS = 300;

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A response that is none of the gateway's errors. Throws Refused. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // a proxy's page, whose status says enough
  }
  throw new Refused(response.status, message);
}

export const askJson = async (path) => (await ask(path, { signal: AbortSignal.timeout(WAIT_MS) })).json();

/** The latest feed, the charts' points of the gateway that sent it, and why there is none. `restart` asks at once. */
export function useFeed() {
  const [state, setState] = useState({ feed: null, points: [], error: null });
  const [round, setRound] = useState(0);
  const shown = useRef({ id: "", points: [] });
  useEffect(() => {
    let timer = 0;
    let ended = false;
    async function look() {
      let wait = EVERY_MS;
      try {
        const { id, points } = shown.current;
        const after = points.length ? points[points.length - 1].t : 0;
        const feed = await askJson(`console/feed?gateway=${encodeURIComponent(id)}&after=${after}`);
        if (ended) return;
        const known = feed.id === id ? points : [];
        shown.current = { id: feed.id, points: [...known, ...(feed.history ?? [])].slice(-MAX_POINTS) };
        setState({ feed, points: shown.current.points, error: null });
      } catch (error) {
        if (ended) return;
        wait = AGAIN_MS;
        setState((before) => ({ ...before, error, feed: error.status === 401 ? null : before.feed }));
      }
      timer = setTimeout(hidden, wait);
    }
    function hidden() {
      if (document.hidden) timer = setTimeout(hidden, EVERY_MS);
      else look();
    }
    look();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [round]);
  return { ...state, restart: () => setRound((before) => before + 1) };
}
