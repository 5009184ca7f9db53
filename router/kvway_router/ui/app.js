// The page of the router. It asks the admin listener once a second and shows what it says.
// Every value goes into the page as text (textContent), never as markup.

const REFRESH_MS = 1000;
const NUM_DECISIONS = 40;
const TERMS = [
  ["queued_s", "queued before it", "t1"],
  ["step_s", "steps shared with decodes", "t2"],
  ["own_s", "its own prefill", "t3"],
  ["reload_s", "blocks from slower tiers", "t6"],
  ["price_s", "price of work while all queue", "t4"],
  ["kv_s", "KV memory getting scarce", "t5"],
  ["failing_s", "failures of late", "t7"],
];

const byId = (id) => document.getElementById(id);

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const integer = (value) => (isNumber(value) ? value.toLocaleString("en") : "–");
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0";
  if (value >= 10) return `${value.toFixed(1)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 0.01) return `${(1000 * value).toFixed(0)} ms`;
  return `${(1000 * value).toFixed(1)} ms`;
}

const clock = (unix) => new Date(1000 * unix).toLocaleTimeString("en-GB");

function median(values) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function cell(row, text, className) {
  row.append(element("td", className, text));
}

function pill(text) {
  const safe = String(text).replace(/[^a-z_]/g, "");
  return element("span", `pill ${safe}`, String(text).replaceAll("_", " "));
}

function outcome(decision) {
  if (decision.finish === "client_gone") return "gone";
  const refused = decision.finish === "done" && decision.status >= 400;
  return refused ? "refused" : decision.finish;
}

function pillCell(row, text, why = "") {
  const td = element("td");
  td.append(pill(text));
  td.title = why;
  row.append(td);
}

function setFill(fill, share) {
  fill.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
}

function barCell(row, part, whole, text) {
  const td = element("td");
  const box = element("div", "with-bar");
  const bar = element("div", "bar");
  const fill = element("div", "fill");
  setFill(fill, whole > 0 ? part / whole : 0);
  bar.append(fill);
  box.append(bar, element("span", "", text));
  td.append(box);
  row.append(td);
}

// --- the page --------------------------------------------------------------------------------

function showTotals(fleet, decisions) {
  const { totals, replicas } = fleet;
  byId("model").textContent = fleet.model;
  byId("hit-rate").textContent = percent(totals.cached_tokens, totals.prompt_tokens);
  setFill(byId("hit-rate-bar"), totals.prompt_tokens > 0 ? totals.cached_tokens / totals.prompt_tokens : 0);
  const known = decisions.filter((d) => isNumber(d.cached_tokens));
  const cached = known.reduce((sum, d) => sum + d.cached_tokens, 0);
  const prompt = known.reduce((sum, d) => sum + d.prompt_tokens, 0);
  byId("hit-rate-note").textContent =
    `${integer(totals.cached_tokens)} cached of ${integer(totals.prompt_tokens)} prompt tokens` +
    (prompt > 0 ? ` · last ${known.length} requests: ${percent(cached, prompt)}` : "");
  byId("requests").textContent = integer(totals.requests);
  byId("in-flight").textContent = `${integer(replicas.reduce((sum, r) => sum + r.in_flight, 0))} in flight`;
  const ttfts = decisions.filter((d) => d.stream && d.status === 200).map((d) => d.ttft_s).filter(isNumber);
  byId("ttft").textContent = seconds(median(ttfts));
  byId("ttft-note").textContent = ttfts.length ? `of the last ${ttfts.length} streams` : "of the streams below";
  const ready = replicas.filter((r) => r.state === "ready").length;
  byId("ready").textContent = `${ready} / ${replicas.length}`;
  byId("blocks").textContent = `${integer(replicas.reduce((sum, r) => sum + r.blocks_held, 0))} blocks in the index`;
}

function showReplicas(replicas) {
  const rows = replicas.map((replica) => {
    const row = element("tr");
    cell(row, replica.replica_id, "mono");
    pillCell(row, replica.state, replica.error || replica.no_report);
    cell(row, integer(replica.in_flight), "num");
    cell(row, seconds(replica.queued_prefill_s), "num");
    cell(row, replica.decode_step_s > 0 ? seconds(replica.decode_step_s) : "–", "num");
    cell(row, replica.prefill_tokens_per_s > 0 ? `${integer(Math.round(replica.prefill_tokens_per_s))} tok/s` : "–", "num");
    barCell(row, replica.blocks_pinned, replica.blocks_total,
      replica.blocks_total > 0 ? `${integer(replica.blocks_pinned)} of ${integer(replica.blocks_total)}` : "–");
    cell(row, integer(replica.blocks_held), "num");
    barCell(row, replica.cached_tokens, replica.prompt_tokens, percent(replica.cached_tokens, replica.prompt_tokens));
    return row;
  });
  byId("replicas").replaceChildren(...rows);
}

function showDecisions(decisions) {
  const focused = document.activeElement?.dataset?.id;
  const rows = decisions.map((decision) => {
    const row = element("tr");
    row.addEventListener("click", () => { location.hash = decision.id; });
    cell(row, clock(decision.time));
    const td = element("td", "mono");
    const button = element("button", "", decision.id.slice(0, 8));
    button.type = "button";
    button.dataset.id = decision.id;
    button.setAttribute("aria-label", `Details of request ${decision.id}`);
    td.append(button);
    row.append(td);
    cell(row, decision.replica_id, "mono");
    pillCell(row, decision.reason);
    cell(row, integer(decision.prompt_tokens), "num");
    barCell(row, decision.cached_tokens ?? 0, decision.prompt_tokens, integer(decision.cached_tokens));
    cell(row, seconds(decision.predicted_ttft_s), "num");
    const ttft = element("td", decision.stream ? "num" : "num quiet", seconds(decision.ttft_s));
    if (!decision.stream) ttft.title = "a whole answer: its first byte comes at its end";
    row.append(ttft);
    const end = element("td");
    end.append(pill(outcome(decision)));
    if (decision.status !== null && decision.status !== 200) end.append(` ${decision.status}`);
    row.append(end);
    return row;
  });
  byId("decisions").replaceChildren(...rows);
  byId("no-decisions").hidden = rows.length > 0;
  if (focused) byId("decisions").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

// --- one decision ----------------------------------------------------------------------------

function fact(list, name, value) {
  const box = element("div");
  box.append(element("dt", "", name), element("dd", "", value));
  list.append(box);
}

function showCandidate(candidate, record, widest) {
  const box = element("div", "candidate");
  const line = element("div", "line");
  line.append(element("span", "mono", candidate.replica_id));
  if (candidate.replica_id === record.replica_id) line.append(pill(record.reason));
  line.append(element("span", "quiet",
    `${integer(candidate.matched_blocks)} of ${integer(record.prompt_blocks)} blocks · ` +
    `${integer(candidate.uncached_tokens)} tokens to compute · ${integer(candidate.in_flight)} in flight`));
  line.append(element("span", "end", `TTFT ${seconds(candidate.predicted_ttft_s)} · cost ${seconds(candidate.cost_s)}`));
  const stack = element("div", "stack");
  for (const [term, name, className] of TERMS) {
    if (!(candidate[term] > 0)) continue;
    const part = element("div", className);
    part.title = `${name}: ${seconds(candidate[term])}`;
    part.style.width = `${(100 * candidate[term]) / widest}%`;
    stack.append(part);
  }
  box.append(line, stack);
  return box;
}

function showDetail(record) {
  byId("detail-title").textContent = `Request ${record.id}`;
  byId("detail-sentence").textContent = record.detail;
  const facts = byId("detail-facts");
  facts.replaceChildren();
  fact(facts, "Arrived", clock(record.time));
  fact(facts, "Route", record.route);
  fact(facts, "Model", record.model);
  fact(facts, "Prompt", `${integer(record.prompt_tokens)} tokens, ${integer(record.prompt_blocks)} blocks`);
  fact(facts, "Matched by the index", `${integer(record.matched_tokens)} tokens`);
  fact(facts, "Cached, says the engine", isNumber(record.cached_tokens) ? `${integer(record.cached_tokens)} tokens` : "–");
  fact(facts, "Predicted TTFT", seconds(record.predicted_ttft_s));
  fact(facts, "Real TTFT", seconds(record.ttft_s));
  fact(facts, "Duration", seconds(record.duration_s));
  fact(facts, "Outcome", [record.finish.replaceAll("_", " "), record.status, record.error].filter((v) => v !== null).join(" · "));
  const widest = Math.max(...record.candidates.map((c) => c.cost_s), 1e-9);
  byId("detail-candidates").replaceChildren(...record.candidates.map((c) => showCandidate(c, record, widest)));
  const attempts = record.attempts.map((attempt) =>
    element("li", "", `${attempt.replica_id} (${attempt.reason.replaceAll("_", " ")})${attempt.error ? `: ${attempt.error}` : ""}`));
  byId("detail-attempts").replaceChildren(...attempts);
}

function showLegend() {
  const items = TERMS.map(([, name, className]) => {
    const item = element("span");
    item.append(element("i", className), name);
    return item;
  });
  byId("detail-legend").replaceChildren(...items);
}

// --- asking ----------------------------------------------------------------------------------

async function ask(path) {
  const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(5000) });
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}

async function refreshDetail() {
  const dialog = byId("detail");
  const id = location.hash.slice(1);
  if (!/^[0-9a-f]{32}$/.test(id)) {
    if (dialog.open) dialog.close();
    return;
  }
  try {
    showDetail(await ask(`admin/decisions/${id}`));
  } catch {
    byId("detail-title").textContent = `Request ${id}`;
    if (!dialog.open) byId("detail-sentence").textContent = "This decision is no longer remembered.";
  }
  if (!dialog.open) dialog.showModal();
}

async function refresh() {
  const live = byId("live");
  try {
    const [fleet, list] = await Promise.all([
      ask("admin/replicas"),
      ask(`admin/decisions?limit=${NUM_DECISIONS}`),
    ]);
    showTotals(fleet, list.decisions);
    showReplicas(fleet.replicas);
    showDecisions(list.decisions);
    await refreshDetail();
    live.className = "live ok";
    byId("live-text").textContent = "live";
  } catch {
    live.className = "live bad";
    byId("live-text").textContent = "router not reached";
  }
  setTimeout(refresh, REFRESH_MS);
}

byId("detail-close").addEventListener("click", () => byId("detail").close());
byId("detail").addEventListener("click", (event) => {
  if (event.target === byId("detail")) byId("detail").close();
});
byId("detail").addEventListener("close", () => {
  if (location.hash) history.replaceState(null, "", location.pathname);
});
window.addEventListener("hashchange", refreshDetail);
showLegend();
refresh();
