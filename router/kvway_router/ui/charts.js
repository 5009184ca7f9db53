// Time series of the last hour, drawn by uPlot.

import { byId, element, isNumber, seconds, short } from "./format.js";

const HEIGHT = 190;
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rate = (key) => (sample) => sample[key] / sample.span_s;
const share = (key) => (sample) => (sample.prompt_tokens > 0 ? (100 * sample[key]) / sample.prompt_tokens : null);
const value = (key) => (sample) => sample[key];
const inPercent = (v) => (isNumber(v) ? `${v.toFixed(v > 0 && v < 10 ? 1 : 0)} %` : "–");
const timeOf = (unix, incr) => new Date(1000 * unix).toLocaleTimeString("en-GB",
  { hour: "2-digit", minute: "2-digit", second: incr < 60 ? "2-digit" : undefined });

const CHARTS = [
  {
    id: "chart-hits", format: inPercent, range: [0, 100],
    series: [
      ["Ceiling", share("ceiling_tokens"), "--f1", [6, 4]],
      ["Best held", share("reachable_tokens"), "--f2"],
      ["Predicted", share("matched_tokens"), "--f3"],
      ["Reported", share("cached_tokens"), "--f4", null, 2.4],
    ],
  },
  {
    id: "chart-ttft", format: seconds, range: null,
    series: [
      ["p95", value("ttft_p95_s"), "--c4"],
      ["p50", value("ttft_p50_s"), "--c1", null, 2.4],
      ["predicted, mean", value("predicted_ttft_s"), "--c2", [6, 4]],
    ],
  },
  {
    id: "chart-requests", format: (v) => (isNumber(v) ? `${short(v)} /s` : "–"), range: null,
    series: [
      ["answered", rate("requests"), "--c1", null, 2.4],
      ["failed", rate("failed"), "--bad"],
    ],
  },
  {
    id: "chart-load", format: short, range: null, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000],
    series: [
      ["in flight", value("in_flight"), "--c2", null, 2.4],
      ["waiting in the router", value("waiting"), "--c4"],
    ],
  },
];

const drawn = new Map();

function options(chart, width) {
  const axis = {
    stroke: colourOf("--quiet"),
    grid: { stroke: colourOf("--line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  return {
    width,
    height: HEIGHT,
    padding: [10, 8, 0, 0],
    cursor: { sync: { key: "kvway" }, y: false, points: { size: 6 } },
    legend: { live: true },
    scales: {
      x: { time: true },
      y: { range: chart.range ?? ((_, low, high) => [0, high > 0 ? 1.08 * high : 1]) },
    },
    axes: [
      { ...axis, space: 70, incrs: [10, 30, 60, 120, 300, 600, 900, 1800], values: (_, ticks, __, ___, incr) => ticks.map((t) => timeOf(t, incr)) },
      { ...axis, size: 58, space: 34, incrs: chart.incrs, values: (_, ticks) => ticks.map((t) => chart.format(t)) },
    ],
    series: [
      { value: (_, t) => (t === null ? "" : new Date(1000 * t).toLocaleTimeString("en-GB")), label: "Time" },
      ...chart.series.map(([label, , colour, dash, thick]) => ({
        label,
        stroke: colourOf(colour),
        width: thick ?? 1.6,
        dash: dash ?? undefined,
        points: { show: false },
        spanGaps: false,
        value: (_, v) => chart.format(v),
      })),
    ],
  };
}

function columns(chart, samples) {
  return [samples.map((s) => s.time), ...chart.series.map(([, of]) => samples.map(of))];
}

// Who cannot see the curves is told their last values.
function describe(chart, samples) {
  const last = samples.at(-1);
  const parts = last ? chart.series.map(([label, of]) => `${label} ${chart.format(of(last))}`) : ["no data yet"];
  byId(chart.id).setAttribute("aria-label", `${byId(chart.id).dataset.title}, now: ${parts.join(", ")}`);
}

// Where nobody points, the legend tells the newest values.
function showLast(plot) {
  const last = plot.data[0].length - 1;
  if (last >= 0 && !(plot.cursor.left >= 0)) plot.setLegend({ idx: last }, false);
}

export function showCharts(samples) {
  for (const chart of CHARTS) {
    const box = byId(chart.id);
    const width = box.clientWidth;
    if (width === 0) continue;
    describe(chart, samples);
    const known = drawn.get(chart.id);
    if (known === undefined) {
      box.replaceChildren(element("div", "plot"));
      const made = new window.uPlot(options(chart, width), columns(chart, samples), box.firstChild);
      drawn.set(chart.id, made);
      showLast(made);
      continue;
    }
    if (known.width !== width) known.setSize({ width, height: HEIGHT });
    known.setData(columns(chart, samples));
    showLast(known);
  }
}

// Colours are read when a chart is made: with others it is made anew.
export function forgetCharts() {
  for (const chart of drawn.values()) chart.destroy();
  drawn.clear();
}
