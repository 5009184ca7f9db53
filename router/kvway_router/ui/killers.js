// Prefix killers: what varies at the front of prompts that agree behind it.

import { bar, byId, element, integer, isNumber, percent, pill, seconds, short } from "./format.js";

function where(finding) {
  const place = `token ${integer(finding.token)}`;
  if (finding.message === null) return `in the ${finding.role}, ${place} of the prompt`;
  return `${finding.role} message ${finding.message + 1}, character ${integer(finding.char)}, ${place} of the prompt`;
}

function figure(name, text, note) {
  const box = element("div", "killer-figure");
  box.append(element("dt", "", name), element("dd", "", text));
  if (note) box.append(element("dd", "note", note));
  return box;
}

function compare(now, moved) {
  const box = element("div", "compare");
  for (const [name, share, className] of [["now", now, "fill bad-fill"], ["if moved", moved, "fill"]]) {
    box.append(element("span", "note", name), bar(share, className), element("span", "num", percent(share, 1)));
  }
  return box;
}

function card(finding) {
  const box = element("article", "killer");
  const head = element("div", "killer-head");
  head.append(pill(finding.kind), element("code", "shape", finding.shape));
  const title = element("h3", "", `${finding.what[0].toUpperCase()}${finding.what.slice(1)} varies`);
  title.append(element("span", "quiet where", ` ${where(finding)}`));
  const figures = element("dl", "killer-figures");
  figures.append(
    figure("Tokens lost", short(finding.lost_tokens), `${percent(finding.token_share, 1)} of all prompt tokens`),
    figure("Per request", short(finding.lost_tokens_per_request), `${short(finding.requests)} requests, ${percent(finding.request_share, 1)}`));
  if (isNumber(finding.ttft_s)) {
    figures.append(figure("TTFT", `${seconds(finding.ttft_s)} → ${seconds(finding.ttft_s_if_moved)}`, "if moved, predicted"));
  }
  const rates = element("div", "killer-figure");
  rates.append(element("dt", "", "Hit rate"), compare(finding.hit_rate, finding.hit_rate_if_moved));
  figures.append(rates);
  const advice = element("p", "advice", finding.advice);
  const example = element("a", "", "a request that lost");
  example.href = `#${finding.example}`;
  advice.append(" ", example);
  box.append(head, title, figures, advice);
  return box;
}

export function showKillers(report) {
  byId("killers").replaceChildren(...report.findings.map(card));
  byId("killers-count").textContent = report.findings.length ? String(report.findings.length) : "";
  byId("no-killers").hidden = report.findings.length > 0;
  byId("no-killers").textContent = report.looked_at > 0
    ? `None found in ${integer(report.requests)} requests (${integer(report.looked_at)} looked at). ` +
      "Nothing varies at the front of prompts that agree behind it."
    : "No request was looked at yet.";
}
