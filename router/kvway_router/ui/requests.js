// Live requests, and all that is known of one: candidates, costs, what really happened.

import {
  barCell, byId, ask, cell, clock, element, integer, isNumber, pill, replicaName, seconds,
} from "./format.js";

const TERMS = [
  ["queued_s", "queued before it", "t1"],
  ["step_s", "steps shared with decodes", "t2"],
  ["own_s", "its own prefill", "t3"],
  ["reload_s", "blocks from slower tiers", "t6"],
  ["price_s", "price of work while all queue", "t4"],
  ["kv_s", "KV memory getting scarce", "t5"],
  ["failing_s", "failures of late", "t7"],
];

function outcome(decision) {
  if (decision.finish === "client_gone") return "gone";
  const refused = decision.finish === "done" && decision.status >= 400;
  return refused ? "refused" : decision.finish;
}

// A replica says what it had cached at the end of its answer; until then the index has a guess.
function cachedCell(row, decision) {
  if (isNumber(decision.cached_tokens)) {
    barCell(row, "Cached", decision.cached_tokens / decision.prompt_tokens, integer(decision.cached_tokens));
  } else if (decision.replica_id) {
    const td = barCell(row, "Cached", decision.matched_tokens / decision.prompt_tokens,
      `≈ ${integer(decision.matched_tokens)}`, "fill guess");
    td.classList.add("quiet");
    td.title = decision.finish === "running"
      ? "by the router's index; the replica says it at the end"
      : "by the router's index; the replica does not say it";
  } else {
    cell(row, "Cached", "–");
  }
}

export function showDecisions(decisions) {
  const wanted = byId("filter").value.trim().toLowerCase();
  const shown = wanted === "" ? decisions : decisions.filter((decision) =>
    [decision.id, decision.replica_id, decision.reason, outcome(decision), decision.status, decision.route]
      .some((text) => String(text).toLowerCase().includes(wanted)));
  const focused = document.activeElement?.dataset?.id;
  const rows = shown.map((decision) => {
    const row = element("tr");
    row.addEventListener("click", () => { location.hash = decision.id; });
    cell(row, "Time", clock(decision.time));
    const button = element("button", "", decision.id.slice(0, 8));
    button.type = "button";
    button.dataset.id = decision.id;
    button.setAttribute("aria-label", `Details of request ${decision.id}`);
    cell(row, "Request", undefined, "mono").append(button);
    cell(row, "Replica").append(replicaName(decision.replica_id));
    cell(row, "Reason").append(pill(decision.reason));
    cell(row, "Prompt", integer(decision.prompt_tokens), "num");
    cachedCell(row, decision);
    cell(row, "Predicted TTFT", decision.replica_id ? seconds(decision.predicted_ttft_s) : "–", "num");
    const ttft = cell(row, "TTFT", seconds(decision.ttft_s), decision.stream ? "num" : "num quiet");
    if (!decision.stream) ttft.title = "a whole answer: its first byte comes at its end";
    cell(row, "Duration", seconds(decision.duration_s), "num");
    const end = cell(row, "Outcome");
    end.append(pill(outcome(decision)));
    if (decision.status !== null && decision.status !== 200) end.append(` ${decision.status}`);
    return row;
  });
  byId("decisions").replaceChildren(...rows);
  byId("no-decisions").hidden = rows.length > 0;
  byId("no-decisions").textContent = decisions.length
    ? "None of the last requests is like that."
    : "No request yet. Send one to the API address and it shows up here.";
  if (focused) byId("decisions").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

// --- one decision ----------------------------------------------------------------------------

function fact(list, name, value) {
  const box = element("div");
  box.append(element("dt", "", name), element("dd", "", value));
  list.append(box);
}

function candidateBox(candidate, chosen, reason, numBlocks, widest) {
  const box = element("div", "candidate");
  const line = element("div", "line");
  line.append(replicaName(candidate.replica_id));
  if (candidate.replica_id === chosen) line.append(pill(reason));
  line.append(element("span", "quiet",
    `${integer(candidate.matched_blocks)} of ${integer(numBlocks)} blocks · ` +
    `${integer(candidate.uncached_tokens)} tokens to compute · ${integer(candidate.in_flight)} in flight`));
  line.append(element("span", "end", `TTFT ${seconds(candidate.predicted_ttft_s)} · cost ${seconds(candidate.cost_s)}`));
  const stack = element("div", "stack");
  const spoken = [];
  for (const [term, name, className] of TERMS) {
    if (!(candidate[term] > 0)) continue;
    const part = element("div", className);
    part.title = `${name}: ${seconds(candidate[term])}`;
    spoken.push(part.title);
    part.style.width = `${(100 * candidate[term]) / widest}%`;
    stack.append(part);
  }
  stack.setAttribute("role", "img");
  stack.setAttribute("aria-label", spoken.join(", ") || "no cost");
  box.append(line, stack);
  return box;
}

export function candidateBoxes(view, numBlocks) {
  const widest = Math.max(...view.candidates.map((c) => c.cost_s), 1e-9);
  return view.candidates.map((c) => candidateBox(c, view.replica_id, view.reason, numBlocks, widest));
}

export function legend() {
  return TERMS.map(([, name, className]) => {
    const item = element("span");
    item.append(element("i", className), name);
    return item;
  });
}

function showDetail(record) {
  byId("detail-title").textContent = `Request ${record.id}`;
  byId("detail-sentence").textContent = record.detail;
  const facts = byId("detail-facts");
  facts.replaceChildren();
  const about = record.prompt_tokens_exact ? "" : "about ";
  fact(facts, "Arrived", clock(record.time));
  fact(facts, "Route", record.route);
  fact(facts, "Model", record.model);
  fact(facts, "Prompt", `${about}${integer(record.prompt_tokens)} tokens, ${integer(record.prompt_blocks)} blocks`);
  fact(facts, "Best replica held", `${integer(record.reachable_tokens)} tokens`);
  fact(facts, "Chosen one held, by the index", `${integer(record.matched_tokens)} tokens`);
  fact(facts, "Cached, says the engine", isNumber(record.cached_tokens) ? `${integer(record.cached_tokens)} tokens`
    : record.finish === "running" ? "it says so at the end" : "it does not say");
  fact(facts, "Predicted TTFT", seconds(record.predicted_ttft_s));
  fact(facts, "Real TTFT", record.ttft_s === null && record.finish === "running" ? "not yet" : seconds(record.ttft_s));
  fact(facts, "Duration", record.finish === "running" ? "it runs" : seconds(record.duration_s));
  fact(facts, "Price of work", record.price_of_work.toFixed(3));
  fact(facts, "Outcome", [record.finish.replaceAll("_", " "), record.status, record.error].filter((v) => v !== null).join(" · "));
  byId("detail-candidates").replaceChildren(...candidateBoxes(record, record.prompt_blocks));
  const attempts = record.attempts.map((attempt) =>
    element("li", "", `${attempt.replica_id} (${attempt.reason.replaceAll("_", " ")})${attempt.error ? `: ${attempt.error}` : ""}`));
  const unusable = record.unusable.map((replica) => element("li", "", `${replica.replica_id} was not usable: ${replica.why}`));
  byId("detail-attempts").replaceChildren(...attempts, ...unusable);
}

// What the address names is shown; of a request that has ended nothing changes any more.
let shownId = "";

export async function refreshDetail() {
  const dialog = byId("detail");
  const id = location.hash.slice(1);
  if (!/^[0-9a-f]{32}$/.test(id)) {
    shownId = "";
    if (dialog.open) dialog.close();
    return;
  }
  if (shownId === id && dialog.open) return;
  try {
    const record = await ask(`admin/decisions/${id}`);
    if (location.hash.slice(1) !== id) return;
    showDetail(record);
    shownId = record.finish === "running" ? "" : id;
  } catch (error) {
    if (error.status !== 404) throw error;
    byId("detail-title").textContent = `Request ${id}`;
    byId("detail-sentence").textContent = "This decision is no longer remembered.";
    for (const part of ["detail-facts", "detail-candidates", "detail-attempts"]) byId(part).replaceChildren();
    shownId = id;
  }
  if (!dialog.open) dialog.showModal();
}

export function startDetail() {
  byId("detail-legend").replaceChildren(...legend());
  byId("detail-close").addEventListener("click", () => byId("detail").close());
  byId("detail").addEventListener("click", (event) => {
    if (event.target === byId("detail")) byId("detail").close();
  });
  byId("detail").addEventListener("close", () => {
    if (/^#[0-9a-f]{32}$/.test(location.hash)) history.replaceState(null, "", location.pathname);
  });
  window.addEventListener("hashchange", () => { refreshDetail().catch(() => undefined); });
}
