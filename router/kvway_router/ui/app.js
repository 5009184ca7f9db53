// The page of the router. It asks the admin listener and shows what it says: once a second for
// replicas and requests, and every few seconds for the rest.

import { forgetCharts, showCharts } from "./charts.js";
import { showFunnel, showGlance, showReplicas } from "./fleet.js";
import { ask, byId } from "./format.js";
import { showKillers } from "./killers.js";
import { playWith, startPlayground } from "./playground.js";
import { refreshDetail, showDecisions, startDetail } from "./requests.js";
import { redrawTree, refreshTree, startTree } from "./tree.js";

const REFRESH_MS = 1000;
const SLOW_EVERY = 3;
const NUM_DECISIONS = 100;
const HOUR_S = 3600;

let history = { started: 0, replicas: {} };
let samples = [];
let lastDecisions = [];
let turn = 0;

// Only what is new is asked for. Another start means another router: its hour begins anew.
async function refreshHistory() {
  const since = samples.at(-1)?.time ?? 0;
  let told = await ask(`admin/history?since=${since}`);
  if (told.started !== history.started && since > 0) told = await ask("admin/history");
  const before = told.started === history.started ? samples : [];
  history = told;
  samples = [...before, ...told.samples];
  const newest = samples.at(-1)?.time ?? 0;
  samples = samples.filter((sample) => sample.time > newest - HOUR_S);
}

async function refreshSlow() {
  const [, report] = await Promise.all([refreshHistory(), ask("admin/prefixes"), refreshTree()]);
  showKillers(report);
  showFunnel(samples);
  showCharts(samples);
}

async function refreshAll() {
  if (turn % SLOW_EVERY === 0) await refreshSlow();
  turn += 1;
  const [fleet, list] = await Promise.all([ask("admin/replicas"), ask(`admin/decisions?limit=${NUM_DECISIONS}`)]);
  showGlance(fleet, samples);
  showReplicas(fleet.replicas, history);
  playWith(fleet.model);
  if (!byId("pause").checked) lastDecisions = list.decisions;
  showDecisions(lastDecisions);
  await refreshDetail();
}

async function refresh() {
  const live = byId("live");
  try {
    await refreshAll();
    live.className = "live ok";
    byId("live-text").textContent = "live";
  } catch (error) {
    turn = 0; // when it is back, everything is asked for at once
    live.className = "live bad";
    byId("live-text").textContent = error.status ? error.message : "router not reached";
  }
}

// Nobody looks at a page that is hidden, and nothing is asked for it.
async function run() {
  if (!document.hidden) await refresh();
  setTimeout(run, REFRESH_MS);
}

function redraw() {
  if (samples.length) showCharts(samples);
  redrawTree();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  forgetCharts();
  redraw();
});
let width = 0;
new ResizeObserver(([entry]) => {
  if (entry.contentRect.width === width) return;
  width = entry.contentRect.width;
  redraw();
}).observe(document.body);
byId("filter").addEventListener("input", () => showDecisions(lastDecisions));
startDetail();
startTree();
startPlayground();
run();
