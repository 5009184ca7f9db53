// The fleet at a glance: totals of late, and each replica.

import {
  bar, barCell, byId, cell, element, integer, isNumber, nameReplicas, percent, pill, replicaName,
  seconds, setShare, short,
} from "./format.js";

const sum = (items, of) => items.reduce((total, item) => total + (of(item) || 0), 0);

// What of the samples lies in the last so many seconds before the newest.
export function lately(samples, seconds) {
  const newest = samples.at(-1)?.time ?? 0;
  return samples.filter((sample) => sample.time > newest - seconds);
}

export function showGlance(fleet, samples) {
  const { totals, replicas } = fleet;
  byId("model").textContent = fleet.model;
  const recent = lately(samples, 300);
  const recentPrompt = sum(recent, (s) => s.prompt_tokens);
  const [cached, prompt, ceiling, when] = recentPrompt > 0
    ? [sum(recent, (s) => s.cached_tokens), recentPrompt, sum(recent, (s) => s.ceiling_tokens), "last 5 min"]
    : [totals.cached_tokens, totals.prompt_tokens, totals.ceiling_tokens, "since the start"];
  byId("hit-rate").textContent = percent(cached, prompt);
  setShare(byId("hit-rate-bar"), cached / prompt);
  byId("hit-rate-ceiling").style.left = `${prompt > 0 ? Math.min(100, (100 * ceiling) / prompt) : 0}%`;
  byId("hit-rate-ceiling").hidden = !(prompt > 0);
  byId("hit-rate-note").textContent = prompt > 0
    ? `${short(cached)} of ${short(prompt)} prompt tokens, ${when} · ceiling ${percent(ceiling, prompt)}`
    : "cached prompt tokens ÷ prompt tokens";

  const minute = lately(samples, 60);
  const length = sum(minute, (s) => s.span_s);
  byId("requests").textContent = length > 0 ? `${short(sum(minute, (s) => s.requests) / length)} /s` : "–";
  const failed = sum(recent, (s) => s.failed);
  byId("requests-note").textContent =
    `${integer(totals.requests)} answered` + (failed ? ` · ${integer(failed)} failed in 5 min` : "");
  byId("requests-note").classList.toggle("bad-text", failed > 0);

  const withTtft = minute.filter((s) => isNumber(s.ttft_p50_s));
  const ttft = withTtft.at(-1);
  byId("ttft").textContent = seconds(ttft?.ttft_p50_s);
  byId("ttft-note").textContent = ttft
    ? `p95 ${seconds(ttft.ttft_p95_s)} · predicted ${seconds(ttft.predicted_ttft_s)}`
    : "median of streams";

  byId("in-flight").textContent = integer(sum(replicas, (r) => r.in_flight));
  byId("waiting").textContent = `${integer(samples.at(-1)?.waiting ?? 0)} waiting · ` +
    `${seconds(sum(replicas, (r) => r.queued_prefill_s))} of prefill queued`;
  const ready = replicas.filter((r) => r.state === "ready").length;
  byId("ready").textContent = `${ready} / ${replicas.length}`;
  byId("ready").classList.toggle("bad-text", ready < replicas.length);
  byId("blocks").textContent = `${short(sum(replicas, (r) => r.blocks_held))} blocks in the index`;
}

// --- one row per replica ---------------------------------------------------------------------

const SPARK = { width: 84, height: 20 };

function spark(values) {
  const svg = byId("spark").content.firstElementChild.cloneNode(true);
  const most = Math.max(1, ...values);
  const step = SPARK.width / Math.max(1, values.length - 1);
  const points = values.map((value, place) =>
    `${(place * step).toFixed(1)},${(SPARK.height - 1 - ((SPARK.height - 2) * value) / most).toFixed(1)}`);
  svg.firstElementChild.setAttribute("points", points.join(" "));
  return svg;
}

function kvCell(row, replica) {
  const td = cell(row, "KV blocks");
  const total = replica.blocks_total;
  if (!(total > 0)) {
    td.textContent = replica.blocks_held ? `${short(replica.blocks_held)} held` : "–";
    td.title = "it does not say how many blocks it has";
    return;
  }
  const live = Math.min(total, replica.blocks_pinned);
  const cached = Math.min(total - live, Math.max(0, replica.blocks_held - live));
  const free = total - live - cached;
  const box = element("div", "with-bar");
  const track = element("div", "bar kv");
  for (const [count, className] of [[live, "kv-live"], [cached, "kv-cached"]]) {
    const part = element("div", className);
    setShare(part, count / total);
    track.append(part);
  }
  const text = `${short(live)} / ${short(cached)} / ${short(free)}`;
  box.append(track, element("span", "", text));
  td.title = `of ${integer(total)} KV blocks ${integer(live)} in use, ${integer(cached)} cached, ${integer(free)} free`;
  td.append(box);
}

function stateCell(row, replica) {
  const td = cell(row, "State");
  td.append(pill(replica.state));
  const why = replica.error || replica.no_report;
  if (why && replica.state === "ready") td.append(element("span", "warn-dot", " !"));
  td.title = why || (replica.fed ? "its KV events keep the index true" : "no KV events: the index is an estimate");
  if (why && replica.state !== "ready") td.append(element("div", "note clip", why));
}

export function showReplicas(replicas, history) {
  nameReplicas(replicas.map((replica) => replica.replica_id));
  const rows = replicas.map((replica) => {
    const row = element("tr");
    const of = history.replicas[replica.replica_id];
    const counts = of?.counts;
    cell(row, "Replica").append(replicaName(replica.replica_id));
    stateCell(row, replica);
    const flying = cell(row, "In flight", undefined, "num");
    const box = element("div", "with-spark");
    box.append(spark(of?.in_flight ?? []), element("span", "", integer(replica.in_flight)));
    flying.append(box);
    cell(row, "Queued prefill", seconds(replica.queued_prefill_s), "num");
    cell(row, "Prefill", replica.prefill_tokens_per_s > 0 ? `${short(replica.prefill_tokens_per_s)} tok/s` : "–", "num");
    cell(row, "Decode step", replica.decode_step_s > 0 ? seconds(replica.decode_step_s) : "–", "num");
    kvCell(row, replica);
    barCell(row, "Hit rate", counts?.cached_tokens / counts?.prompt_tokens,
      counts ? percent(counts.cached_tokens, counts.prompt_tokens) : "–");
    const streams = counts?.streams > 0;
    cell(row, "TTFT", streams ? seconds(counts.ttft_s / counts.streams) : "–", "num");
    const predicted = cell(row, "Predicted", streams ? seconds(counts.predicted_ttft_s / counts.streams) : "–", "num");
    if (streams) predicted.title = `off by ${seconds(counts.ttft_error_s / counts.streams)} on average`;
    return row;
  });
  byId("replicas").replaceChildren(...rows);
  byId("no-replicas").hidden = rows.length > 0;
}

// --- the cache funnel ------------------------------------------------------------------------

const STAGES = [
  ["prompt_tokens", "Prompt tokens", "", "f0"],
  ["ceiling_tokens", "Ceiling of the traffic", "never sent before", "f1"],
  ["reachable_tokens", "Best replica held", "evicted, or its replica gone", "f2"],
  ["matched_tokens", "Chosen replica predicted", "waiting there would cost more", "f3"],
  ["cached_tokens", "Engine reported", "the index was wrong", "f4"],
];

export function showFunnel(samples) {
  const recent = lately(samples, 60);
  const length = sum(recent, (s) => s.span_s);
  const totals = STAGES.map(([key]) => sum(recent, (s) => s[key]));
  const [prompt] = totals;
  const rows = STAGES.map(([, name, lost, className], place) => {
    const row = element("li", "stage");
    const line = element("div", "line");
    line.append(
      element("span", "", name),
      element("span", "quiet lost", place > 0 && prompt > 0 && totals[place - 1] > totals[place]
        ? `−${percent(totals[place - 1] - totals[place], prompt)} ${lost}` : ""),
      element("span", "end", length > 0 ? `${short(totals[place] / length)} tok/s` : "–"),
      element("span", "share", place > 0 ? percent(totals[place], prompt) : ""));
    row.append(line, bar(prompt > 0 ? totals[place] / prompt : 0, `fill ${className}`));
    return row;
  });
  byId("funnel").replaceChildren(...rows);
}
