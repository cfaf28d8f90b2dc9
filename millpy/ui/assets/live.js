// Keeps a page as the database is. One stream of server-sent events says what has changed; then the parts of the page
// that name the topic in `data-live` are fetched again: at most once a second, at once when a worker has come, gone or
// taken intervals, and not while nobody looks at the page.

const TOPICS = ["progress", "workers", "sources", "accounts", "events", "trouble"];
const REST_MS = 1000;
const GATHER_MS = 50; // the topics of one look come one by one
const RETRY_MS = 3000;
const SILENT_MS = 25000; // without an event for so long, ask whether the server is there
const graph = document.body.dataset.graph;
const status = document.getElementById("live-status");
const last = new Map();
const changed = new Set();
const asking = new Map();
let source = null;
let restMs = REST_MS;
let timer = 0;
let urgent = false;
let shownAt = -Infinity;
let retry = 0;
let heardAt = 0;

function say(text, kind) {
  if (status && status.textContent !== text) {
    status.textContent = text;
    status.dataset.kind = kind;
  }
}

function own(rows) {
  return graph && Array.isArray(rows) ? rows.filter((row) => row.graph === undefined || row.graph === graph) : rows;
}

function note(topic, text) {
  heardAt = performance.now();
  const rows = own(JSON.parse(text));
  const key = JSON.stringify(rows);
  if (topic === "trouble") {
    say("The database does not answer.", "bad");
    return;
  }
  say("Live", "good");
  if (topic === "events" ? rows.length === 0 : last.get(topic) === key) return;
  last.set(topic, key);
  alarm(topic, rows);
  changed.add(topic);
  urgent = urgent || topic === "workers"; // rare, unlike progress; and an answer that failed is not urgent
  plan();
}

// What needs somebody is marked in the menu, whatever view is open: [topic, view, what is wrong].
const ALARMS = [
  ["progress", "workers", (rows) => count(rows, (row) => row.low_watermark !== "infinity" && row.intervals - row.live, "interval(s) without a live worker")],
  ["accounts", "accounting", (rows) => count(rows, (row) => row.unbalanced, "account(s) not balanced")],
  ["sources", "graph", (rows) => count(rows, (row) => ["paused", "disconnected"].includes(row.state) && row.partitions, "source partition(s) paused or disconnected")],
];

function count(rows, number, what) {
  const sum = rows.reduce((before, row) => before + Number(number(row) || 0), 0);
  return sum ? `${sum} ${what}` : "";
}

function alarm(topic, rows) {
  for (const [own, view, wrong] of ALARMS) {
    const link = own === topic && document.querySelector(`.views a[data-view="${view}"]`);
    if (!link) continue;
    const text = wrong(rows);
    if ((link.dataset.alarm || "") === text) continue;
    link.dataset.alarm = link.title = text;
    link.querySelector(".alert")?.remove();
    if (!text) continue;
    const sign = document.createElement("span");
    sign.className = "alert";
    sign.textContent = "▲";
    const words = document.createElement("span");
    words.className = "hidden";
    words.textContent = ` ${text}`;
    sign.append(words);
    link.append(sign);
  }
}

function plan() {
  if ((timer && !urgent) || !changed.size || document.hidden) return;
  clearTimeout(timer);
  timer = setTimeout(show, Math.max(GATHER_MS, urgent ? 0 : shownAt + restMs - performance.now()));
}

function show() {
  timer = 0;
  if (asking.size || document.hidden) return;
  shownAt = performance.now();
  urgent = false;
  const topics = new Set(changed);
  changed.clear();
  document.dispatchEvent(new CustomEvent("millpy:live", { detail: topics }));
  for (const part of document.querySelectorAll("[data-live]")) {
    if (part.dataset.live.split(" ").some((topic) => topics.has(topic))) refresh(part);
  }
}

function refresh(part) {
  asking.set(part.id, performance.now());
  htmx.trigger(part, "live");
}

// Call `handle(topics)` whenever one of the topics has changed: for charts, which no template draws.
export function onLive(topics, handle) {
  document.addEventListener("millpy:live", (event) => {
    if (topics.some((topic) => event.detail.has(topic))) handle(event.detail);
  });
}

// Return the JSON of a path of the API.
export async function fetchJson(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" }, cache: "no-store" }); // sends "no-cache"
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function lose() {
  say("Connection lost. Trying again.", "bad");
  source.close();
  if (!retry) retry = setTimeout(connect, RETRY_MS);
}

// A connection can be dead without an error, and the server's comments are not shown to scripts.
async function probe() {
  if (document.hidden || retry || performance.now() - heardAt < SILENT_MS) return;
  try {
    await fetch("/live", { signal: AbortSignal.timeout(SILENT_MS / 3) });
    heardAt = performance.now();
  } catch {
    lose();
  }
}

function connect() {
  retry = 0;
  if (source) source.close();
  source = new EventSource("/v1/live");
  source.onopen = () => {
    heardAt = performance.now();
    say("Live", "good");
  };
  source.onerror = lose; // a browser gives up after some errors: here it never does
  for (const topic of TOPICS) source.addEventListener(topic, (event) => note(topic, event.data));
}

document.addEventListener("htmx:configRequest", (event) => {
  const token = document.querySelector('meta[name="csrf-token"]').content;
  if (token) event.detail.headers["X-CSRF-Token"] = token;
  event.detail.headers["Cache-Control"] = "no-cache"; // an answer from before what has just been told would stay
});

document.addEventListener("htmx:afterRequest", (event) => {
  const id = event.detail.elt.id;
  if (!asking.has(id)) return;
  restMs = Math.max(REST_MS, performance.now() - asking.get(id)); // what takes long is asked for less often
  asking.delete(id);
  if (!event.detail.successful) {
    if (!retry) say("This page could not be shown again. Trying again.", "bad"); // a lost connection has been said
    document.getElementById(id).dataset.live.split(" ").forEach((topic) => changed.add(topic));
  }
  plan();
});

// An answer that is an error is shown where its note belongs.
document.addEventListener("htmx:beforeSwap", (event) => {
  const { xhr, target } = event.detail;
  if (xhr.status >= 400 && target.id === "note") event.detail.shouldSwap = true;
});

// After an action, every part is shown again.
document.addEventListener("refresh", () => {
  TOPICS.forEach((topic) => changed.add(topic));
  plan();
});

document.addEventListener("visibilitychange", plan);
window.addEventListener("pagehide", () => source && source.close());
window.addEventListener("pageshow", (event) => event.persisted && source && connect());

// What a user has opened, marked or typed stays as it is when a part is shown again; `data-keep` is drawn by a script.
Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, node) =>
  !(name === "open" && node instanceof HTMLDetailsElement) && !(name === "checked" && node instanceof HTMLInputElement);
Idiomorph.defaults.callbacks.beforeNodeMorphed = (node) => !(node instanceof Element && node.hasAttribute("data-keep"));
Idiomorph.defaults.ignoreActiveValue = true;

// On a phone the menu is wider than the screen.
document.querySelector(".views a[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

// Live updates tell of all tenants: a user with a role of the database does not get them.
const follows = "follows" in document.body.dataset;
if (follows && document.querySelector("[data-live], [data-keep]")) {
  connect();
  setInterval(probe, SILENT_MS / 3);
} else if (status) status.remove();
