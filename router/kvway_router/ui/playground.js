// A prompt: its tokens, coloured by who holds them, and what each replica would cost.

import { byId, element, integer, isNumber, post, replicaName, seconds, underline } from "./format.js";
import { candidateBoxes, legend } from "./requests.js";

const SEND_TIMEOUT_MS = 120000;
const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");

let model = "";

function body() {
  const messages = [{ role: "user", content: byId("play-user").value }];
  const system = byId("play-system").value;
  if (system !== "") messages.unshift({ role: "system", content: system });
  return { model, messages };
}

function block(view, place, texts) {
  const full = texts.length === view.block_size && (place + 1) * view.block_size <= view.prompt_tokens;
  const holders = view.candidates.filter((c) => c.matched_blocks > place).map((c) => c.replica_id);
  const box = element("span", full ? "block" : "block open");
  const names = holders.length ? `held by ${holders.join(", ")}` : "held by nobody";
  box.title = `block ${place + 1}, tokens ${place * view.block_size + 1} to ${place * view.block_size + texts.length}: ` +
    (full ? names : "not full, so it is not shared");
  if (full && holders.length) {
    box.classList.add("held");
    box.style.background = underline(holders);
  }
  for (const text of texts) box.append(element("span", "token", visible(text)));
  return box;
}

function showPreview(view) {
  const blocks = [];
  for (let start = 0; start < view.tokens.length; start += view.block_size) {
    blocks.push(block(view, start / view.block_size, view.tokens.slice(start, start + view.block_size)));
  }
  byId("play-tokens").replaceChildren(...blocks);
  const numBlocks = Math.floor(view.prompt_tokens / view.block_size);
  const best = Math.max(0, ...view.candidates.map((c) => c.matched_blocks));
  const left = view.prompt_tokens - view.tokens.length;
  byId("play-note").textContent =
    `${integer(view.prompt_tokens)} tokens, ${integer(numBlocks)} full blocks of ${view.block_size}; ` +
    `${integer(best)} of them are held by some replica.` +
    (left > 0 ? ` The last ${integer(left)} tokens are not shown.` : "");
  const holders = view.candidates.filter((c) => c.matched_blocks > 0).map((c) => replicaName(c.replica_id));
  byId("play-holders").replaceChildren(...holders);
  byId("play-sentence").textContent = view.detail;
  byId("play-candidates").replaceChildren(...candidateBoxes(view, numBlocks));
  byId("play-result").hidden = false;
}

function showAnswer(answer, sentAt) {
  const { headers, body: whole } = answer;
  const choice = whole.choices?.[0];
  byId("play-answer").hidden = false;
  byId("play-answer-text").textContent = choice?.message?.content ?? choice?.text ?? "";
  const cached = whole.usage?.prompt_tokens_details?.cached_tokens;
  byId("play-answer-note").textContent =
    `${headers.get("x-kvway-replica") ?? ""} · ${seconds((performance.now() - sentAt) / 1000)} · ` +
    `${isNumber(cached) ? integer(cached) : "unknown"} of ${integer(whole.usage?.prompt_tokens)} prompt tokens cached · `;
  const id = headers.get("x-kvway-request-id");
  if (id) {
    const link = element("a", "", "its decision");
    link.href = `#${id}`;
    byId("play-answer-note").append(link);
  }
}

// One thing at a time: while it runs, nothing else can be started.
async function doing(work) {
  const buttons = [byId("play-preview"), byId("play-send")];
  for (const button of buttons) button.disabled = true;
  byId("play-error").textContent = "";
  try {
    await work();
  } catch (error) {
    byId("play-error").textContent = error.name === "TimeoutError" ? "No answer in time." : error.message;
  }
  for (const button of buttons) button.disabled = false;
}

const preview = async () => showPreview((await post("admin/playground/v1/chat/completions", body())).body);

async function send() {
  const sentAt = performance.now();
  const wanted = { ...body(), max_tokens: Number(byId("play-max").value) };
  showAnswer(await post("admin/playground/send/v1/chat/completions", wanted, SEND_TIMEOUT_MS), sentAt);
  await preview();
}

export function startPlayground() {
  byId("play-legend").replaceChildren(...legend());
  byId("play-form").addEventListener("submit", (event) => {
    event.preventDefault();
    doing(preview);
  });
  byId("play-send").addEventListener("click", () => doing(send));
}

export function playWith(served) {
  model = served;
}
