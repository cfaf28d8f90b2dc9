// Draws the graph from the tables of the page, and its last minutes.
import { fetchJson, onLive } from "./live.js";
import { drawLines } from "./charts.js";
import * as dagre from "./vendor/dagre.esm.js";

const SVG = "http://www.w3.org/2000/svg";
const FONT = '14px system-ui, sans-serif';
const LINE = 18;
const SERIES_MS = 4500;
const SERIES_MAX = 12;
const measured = document.createElement("canvas").getContext("2d");
let askedAt = -SERIES_MS;

function make(tag, attributes, parent, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function width(lines) {
  measured.font = FONT;
  return Math.max(...lines.map((line) => measured.measureText(line).width));
}

function cells(row) {
  return [...row.children].map((cell) => cell.textContent.trim().replace(/\s+/g, " "));
}

function read(number) {
  const nodes = [...document.querySelectorAll(`[data-nodes="${number}"] [data-node]`)].map((row) => {
    const link = row.querySelector("a");
    const name = row.querySelector("th bdi").textContent;
    const { node: id, lag } = row.dataset;
    const holds = "holds" in row.dataset;
    const lines = [name, cells(row)[1], holds ? `⚑ holds the watermark, ${lag}` : lag && lag !== "–" ? `${lag} behind` : ""];
    return { id, lines, holds, kind: cells(row)[1].split(":")[0], href: link ? link.getAttribute("href") : "" };
  });
  const edges = [...document.querySelectorAll(`[data-edges="${number}"] [data-from]`)].map((row) => {
    const rate = row.querySelector("[data-rate]").textContent.trim();
    const backlog = row.querySelector("[data-backlog]").textContent.trim();
    const figures = [rate === "–" ? "" : `${rate}/s`, backlog === "–" ? "" : `${backlog} waiting`].filter(Boolean).join(", ");
    return { from: row.dataset.from, to: row.dataset.to, lines: [cells(row)[0], figures] };
  });
  return { nodes, edges };
}

function laidOut({ nodes, edges }) {
  const graph = new dagre.Graph({ multigraph: true });
  graph.setGraph({ rankdir: innerWidth < 700 ? "TB" : "LR", nodesep: 30, ranksep: 40, marginx: 12, marginy: 12 });
  graph.setDefaultEdgeLabel(() => ({}));
  const known = new Set(nodes.map((node) => node.id));
  for (const node of nodes) {
    const wide = Math.max(width([...node.lines.slice(0, 2), "⚑ holds the watermark, 00 min 00 s"]) + 28, 120);
    graph.setNode(node.id, { width: wide, height: 3 * LINE + 18 });
  }
  edges.forEach((edge, place) => {
    if (!known.has(edge.from) || !known.has(edge.to)) return;
    const wide = width([edge.lines[0], "000 000/s, 000 000 waiting"]) + 12;
    graph.setEdge(edge.from, edge.to, { width: wide, height: 2 * LINE, labelpos: "c" }, String(place));
  });
  dagre.layout(graph);
  return graph;
}

function draw(place) {
  const number = place.dataset.drawing;
  const found = read(number);
  const shape = JSON.stringify([found.nodes.map((node) => [node.id, node.href]), found.edges.map((edge) => [edge.from, edge.to]), innerWidth < 700]);
  if (place.dataset.shape !== shape) {
    place.dataset.shape = shape;
    place.replaceChildren();
    build(place, number, found);
  }
  for (const node of found.nodes) fill(place.querySelector(`[data-id="${CSS.escape(node.id)}"]`), node.lines, node.holds);
  found.edges.forEach((edge, at) => fill(place.querySelector(`[data-edge="${at}"]`), edge.lines, false));
}

function fill(group, lines, holds) {
  if (!group) return;
  const texts = group.querySelectorAll("text");
  lines.forEach((line, place) => {
    if (texts[place].textContent !== line) texts[place].textContent = line;
  });
  group.classList.toggle("holds", holds);
}

function build(place, number, { nodes, edges }) {
  const graph = laidOut({ nodes, edges });
  const size = graph.graph();
  const svg = make("svg", { width: size.width, height: size.height, viewBox: `0 0 ${size.width} ${size.height}`, role: "group", "aria-label": "Graph" }, place);
  Object.assign(svg.style, { maxWidth: "100%", minWidth: `${0.7 * size.width}px`, height: "auto" });
  const marker = make("marker", { id: `arrow-${number}`, viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 8, markerHeight: 8, orient: "auto-start-reverse" }, make("defs", {}, svg));
  make("path", { d: "M0 0 10 5 0 10z", class: "arrow" }, marker);
  for (const key of graph.edges()) {
    const edge = graph.edge(key);
    const path = edge.points.map(({ x, y }, at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    const group = make("g", { class: "edge", "data-edge": key.name }, svg);
    make("path", { d: path, "marker-end": `url(#arrow-${number})` }, group);
    [-4, LINE - 4].forEach((down) => make("text", { x: edge.x, y: edge.y + down, "text-anchor": "middle" }, group));
  }
  for (const node of nodes) {
    const { x, y, width: wide, height: high } = graph.node(node.id);
    const parent = node.href ? make("a", { href: node.href }, svg) : svg;
    const group = make("g", { class: `node ${node.kind}`, "data-id": node.id }, parent);
    make("rect", { x: x - wide / 2, y: y - high / 2, width: wide, height: high, rx: node.kind === "table" ? 2 : 10 }, group);
    [0, 1, 2].forEach((line) => make("text", { x, y: y - high / 2 + LINE * (line + 1) + 4, "text-anchor": "middle", class: `line-${line}` }, group));
  }
}

function drawAll() {
  document.querySelectorAll("[data-drawing]").forEach(draw);
}

async function drawSeries() {
  if (performance.now() - askedAt < SERIES_MS) return;
  askedAt = performance.now();
  const path = `/v1/graphs/${encodeURIComponent(document.body.dataset.graph)}/series`;
  let found;
  try {
    found = await fetchJson(path);
  } catch {
    return; // the status line says that the server is away
  }
  const now = Date.now() / 1000;
  const times = found.ages_s.map((age) => now - age);
  const rates = found.records.map((line) => ({ label: line.consumer ? `${line.stream} → ${line.consumer}` : `into ${line.stream}`, values: line.rate }));
  const lags = Object.entries(found.lag_s).map(([label, values]) => ({ label, values }));
  const latencies = Object.entries(found.latency_s).map(([name, values]) => ({ label: name.replace("_", " "), values: values.map((value) => value === null ? null : value * 1000) }));
  drawLines(document.getElementById("rates"), times, rates.slice(0, SERIES_MAX), { unit: "records/s", fromZero: true });
  drawLines(document.getElementById("lags"), times, lags.slice(0, SERIES_MAX), { unit: "s", fromZero: true });
  drawLines(document.getElementById("latencies"), times, latencies, { unit: "ms", fromZero: true });
}

drawAll();
drawSeries();
document.addEventListener("htmx:afterSettle", drawAll);
addEventListener("resize", drawAll);
onLive(["progress", "accounts", "sources"], drawSeries);
for (const chart of document.querySelectorAll("[data-series]")) chart.addEventListener("millpy:scheme", () => { askedAt = -SERIES_MS; drawSeries(); });
