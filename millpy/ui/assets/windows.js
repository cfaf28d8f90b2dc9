// Draws the rows of the table below as a chart: a point for each window, told apart by its state.

import { axis, color, times } from "./charts.js";

const STATES = [
  { name: "open", label: "open", color: "--series-1", size: 8, hollow: true },
  { name: "changeable", label: "may change", color: "--series-4", size: 5 },
  { name: "amended", label: "amended", color: "--series-2", size: 11, hollow: true, width: 3 },
  { name: "final", label: "final", color: "--series-3", size: 7 },
];
const HEIGHT = 260;
const box = document.getElementById("chart");
const note = document.getElementById("point");
let chart = null;
let drawn = "";

function rows() {
  const found = [...document.querySelectorAll("#rows tr[data-at]")].map((row) => ({
    row,
    at: Number(row.dataset.at),
    value: Number(row.dataset.value),
    state: row.dataset.state,
    key: row.dataset.key,
  }));
  return found.filter((one) => Number.isFinite(one.value)).sort((a, b) => a.at - b.at);
}

function series(single) {
  const ground = color("--ground");
  const line = { label: box.dataset.label, stroke: color("--muted"), width: 1, points: { show: false }, spanGaps: true, show: single, class: "line" };
  const points = STATES.map(({ label, color: name, size, hollow, width }) => ({
    label,
    stroke: color(name),
    paths: () => null,
    points: { show: true, size, width: width || 1.5, stroke: color(name), fill: hollow ? ground : color(name) },
  }));
  return [{ label: "window" }, line, ...points];
}

function draw(force) {
  const found = rows();
  const text = found.map((one) => [one.at, one.value, one.state, one.key].join()).join(";");
  if (text === drawn && !force) return;
  drawn = text;
  const single = new Set(found.map((one) => one.key)).size <= 1;
  const values = found.map((one) => one.value);
  const data = [
    found.map((one) => one.at),
    values,
    ...STATES.map(({ name }) => found.map((one) => (one.state === name ? one.value : null))),
  ];
  if (chart) chart.destroy();
  chart = new uPlot(
    {
      width: box.clientWidth - 2,
      height: HEIGHT,
      padding: [null, 32, null, null],
      tzDate: (ts) => uPlot.tzDate(new Date(ts * 1e3), "Etc/UTC"),
      series: series(single),
      axes: [{ ...axis(), space: 80, values: times }, axis(box.dataset.label)],
      legend: { live: false },
      cursor: { drag: { x: true, y: false } },
      hooks: { setCursor: [(u) => say(found[u.cursor.idx])] },
    },
    data,
    box,
  );
  chart.over.addEventListener("click", () => show(found[chart.cursor.idx]));
}

function say(one) {
  if (!one) return;
  const time = new Date(one.at * 1e3).toISOString().replace(".000Z", "Z");
  const keys = [...one.row.querySelectorAll("td bdi")].map((part) => part.textContent).slice(0, 2);
  note.textContent = `${time}  ${keys.join(", ")}  ${box.dataset.label} ${one.value}`;
}

function show(one) {
  const link = one && document.getElementById(one.row.id)?.querySelector("a.details");
  if (!link) return;
  link.scrollIntoView({ block: "center" });
  link.focus();
}

if (box) {
  draw();
  document.addEventListener("htmx:afterSettle", () => draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
  new ResizeObserver(() => chart && chart.setSize({ width: box.clientWidth - 2, height: HEIGHT })).observe(box);
}
