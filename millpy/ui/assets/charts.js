// Lines over time, drawn by uPlot. Series differ by dash as well as by color; colors are those of the scheme.

const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const HEIGHT = 220;

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function axis(unit) {
  const shown = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
  return unit === undefined ? shown : { ...shown, label: unit, size: 64 };
}

// Times of day in UTC; the day where a new one begins, and seconds only where there is room for them.
export function times(_, splits, __, ___, apart) {
  return splits.map((seconds) => {
    const text = new Date(seconds * 1000).toISOString();
    if (apart >= 86400 || seconds % 86400 === 0) return text.slice(5, 10);
    return text.slice(11, apart < 60 ? 19 : 16);
  });
}

function range(_, low, high, fromZero) {
  if (low === null) return [0, 1];
  const from = fromZero ? Math.min(low, 0) : low;
  const room = (high - from) / 10 || Math.abs(high) / 10 || 1;
  return [fromZero ? from : from - room, high + room];
}

function options(element, lines, { unit, fromZero = false }) {
  return {
    width: Math.max(element.clientWidth, 200),
    height: HEIGHT,
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "UTC"),
    legend: { live: true },
    scales: { y: { range: (chart, low, high) => range(chart, low, high, fromZero) } },
    axes: [{ ...axis(), space: 80, values: times }, axis(unit)],
    series: [
      { label: "UTC", value: (_, seconds) => (seconds === null ? "" : new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ")) },
      ...lines.map((line, place) => ({
        label: line.label,
        stroke: color(`--series-${(place % 4) + 1}`),
        dash: DASHES[Math.floor(place / 4) % 4 || place % 4],
        width: 2,
        points: line.points || { show: false },
      })),
    ],
  };
}

// Draw lines into an element, or give new values to those that it has. `times` are seconds since the epoch, `lines` have
// a `label`, which is written as text, and `values`, null for none. `given` may have `unit` and `fromZero`.
export function drawLines(element, times, lines, given = {}) {
  const data = [times, ...lines.map((line) => line.values)];
  const key = JSON.stringify(lines.map((line) => line.label));
  if (element.chart && element.dataset.lines === key) {
    element.chart.setData(data);
    return element.chart;
  }
  if (element.chart) element.chart.destroy();
  else {
    new ResizeObserver(() => {
      if (element.clientWidth > 0) element.chart.setSize({ width: element.clientWidth, height: HEIGHT });
    }).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      delete element.dataset.lines;
      element.dispatchEvent(new CustomEvent("millpy:scheme"));
    });
  }
  element.dataset.lines = key;
  element.chart = new uPlot(options(element, lines, given), data, element);
  return element.chart;
}
