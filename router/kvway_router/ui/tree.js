// The tree of prefixes as an icicle: depth from top to bottom, width by traffic or by tokens held.

import { ask, byId, colour, element, integer, percent, replicaName, short, span, stripes } from "./format.js";

const ROW = 34;
const MAX_ROWS = 14;
const MIN_WIDTH = 0.8;
const GAP_FROM = 4; // thinner boxes touch
const WEIGHTS = { traffic: (branch) => branch.requests, held: (branch) => branch.held_tokens };

let outline = null;
let root = "";
let trail = [];
let selected = "";

const mode = () => (byId("width-held").checked ? "held" : "traffic");
const find = (id) => outline.branches.findIndex((branch) => branch.id === id);

// Where each branch is: left end and width as shares of the whole, and its row.
export function layOut(branches, weightOf) {
  const boxes = branches.map(() => null);
  const behind = new Map();
  branches.forEach((branch, place) => {
    if (!behind.has(branch.parent)) behind.set(branch.parent, []);
    behind.get(branch.parent).push(place);
  });
  const put = (parent, left, width, weight, row) => {
    if (!(weight > 0)) return;
    let at = left;
    const places = (behind.get(parent) ?? []).toSorted((a, b) => weightOf(branches[b]) - weightOf(branches[a]));
    for (const place of places) {
      const own = weightOf(branches[place]);
      const size = (width * own) / weight;
      boxes[place] = { left: at, width: size, row };
      at += size;
    }
    for (const place of places) put(place, boxes[place].left, boxes[place].width, weightOf(branches[place]), row + 1);
  };
  const whole = (behind.get(-1) ?? []).reduce((total, place) => total + weightOf(branches[place]), 0);
  put(-1, 0, 1, whole, 0);
  return boxes;
}

function label(branch, width) {
  const tokens = `${short(branch.tokens)} tok`;
  if (width > 150) return `${tokens} · ${percent(branch.requests, outline.prompts)}`;
  return width > 62 ? tokens : "";
}

function holdersOf(branch) {
  return branch.holders.map((holder) => [outline.replicas[holder.replica], holder.tokens / branch.tokens]);
}

function spoken(branch) {
  const names = branch.holders.map((holder) => outline.replicas[holder.replica]).join(", ");
  return `${integer(branch.tokens)} tokens from token ${integer(branch.start)}, ` +
    `${integer(branch.requests)} of the last ${integer(outline.prompts)} requests, held by ${names || "none"}`;
}

function draw() {
  const box = byId("icicle");
  box.hidden = false; // what is hidden has no width
  const width = box.clientWidth;
  const boxes = layOut(outline.branches, WEIGHTS[mode()]);
  const focused = document.activeElement?.dataset?.branch;
  let deepest = 0;
  const made = [];
  outline.branches.forEach((branch, place) => {
    const at = boxes[place];
    if (at === null || at.row >= MAX_ROWS || at.width * width < MIN_WIDTH) return;
    deepest = Math.max(deepest, at.row + 1);
    const button = element("button", "branch", label(branch, at.width * width));
    button.type = "button";
    button.dataset.branch = branch.id;
    button.tabIndex = branch.id === selected || (selected === "" && place === 0) ? 0 : -1;
    button.setAttribute("aria-label", spoken(branch));
    button.setAttribute("aria-pressed", String(branch.id === selected));
    button.title = spoken(branch);
    button.style.left = `${100 * at.left}%`;
    button.style.width = `calc(${100 * at.width}% - ${at.width * width < GAP_FROM ? 0 : 1}px)`;
    button.style.top = `${at.row * ROW}px`;
    const stripe = element("span", "stripe");
    stripe.style.background = stripes(holdersOf(branch));
    if (branch.holders.length === 1) button.style.setProperty("--own", colour(outline.replicas[branch.holders[0].replica]));
    button.classList.toggle("cold", branch.requests === 0);
    button.append(stripe);
    made.push(button);
  });
  box.style.height = `${Math.max(1, deepest) * ROW}px`;
  box.replaceChildren(...made);
  if (focused) focusOn(focused);
  const nothing = made.length === 0;
  box.hidden = nothing;
  byId("no-tree").hidden = !nothing;
  byId("no-tree").textContent = outline.branches.length
    ? "None of the last requests runs along what is held here; look by tokens held."
    : "No replica holds anything yet.";
}

function showNote() {
  byId("tree-note").textContent =
    `${short(outline.blocks * outline.block_size)} different tokens held · the last ${integer(outline.prompts)} prompts` +
    (outline.hidden > 0 ? ` · ${integer(outline.hidden)} more beginnings that are not shown` : "");
  const crumbs = [["", "all"], ...trail].map(([id, name], place, all) => {
    const button = element("button", "crumb", name);
    button.type = "button";
    button.disabled = place === all.length - 1;
    button.addEventListener("click", () => zoomTo(id, trail.slice(0, place)));
    return button;
  });
  byId("crumbs").replaceChildren(...crumbs);
}

function showSelected() {
  const box = byId("branch");
  const branch = outline.branches[find(selected)];
  box.hidden = branch === undefined;
  if (branch === undefined) return;
  const title = element("h3", "", `${integer(branch.tokens)} tokens, from token ${integer(branch.start)} to ${integer(branch.start + branch.tokens)}`);
  const note = element("p", "note",
    `${integer(branch.requests)} of the last ${integer(outline.prompts)} requests pass here (${percent(branch.requests, outline.prompts)})` +
    ` · ${short(branch.held_tokens)} tokens held here and behind` +
    (branch.hidden > 0 ? ` · ${integer(branch.hidden)} branches behind it are not shown` : ""));
  const list = element("ul", "holders");
  for (const holder of branch.holders) {
    const item = element("li");
    item.append(replicaName(outline.replicas[holder.replica]));
    const part = holder.tokens < branch.tokens ? `${integer(holder.tokens)} of its tokens, ` : "";
    const left = holder.left_s === null ? "stays: nothing is evicted"
      : holder.left_s > 0 ? `about ${span(holder.left_s)} left if nobody uses it` : "next to be evicted";
    item.append(element("span", "quiet", `${part}last used ${span(holder.idle_s)} ago, ${left}`));
    list.append(item);
  }
  box.replaceChildren(title, note, list);
  if (branch.sharers.length) {
    const sharers = element("p", "sharers note", "Requests that share it: ");
    for (const id of branch.sharers.slice(0, 8)) {
      const link = element("a", "mono", id.slice(0, 8));
      link.href = `#${id}`;
      sharers.append(link, " ");
    }
    box.append(sharers);
  }
}

// --- moving about ----------------------------------------------------------------------------

function focusOn(id) {
  byId("icicle").querySelector(`[data-branch="${CSS.escape(id)}"]`)?.focus({ preventScroll: true });
}

function select(id) {
  selected = id;
  for (const button of byId("icicle").children) {
    const isIt = button.dataset.branch === id;
    button.tabIndex = isIt ? 0 : -1;
    button.setAttribute("aria-pressed", String(isIt));
  }
  showSelected();
}

async function zoomTo(id, towards) {
  root = id;
  trail = towards;
  try {
    await refreshTree();
  } catch {
    return; // the page says that the router is not reached, and asks again
  }
  const first = outline.branches[0]?.id;
  if (first !== undefined) {
    select(id || first);
    focusOn(selected);
  }
}

function zoomInto(id) {
  const branch = outline.branches[find(id)];
  if (branch === undefined) return;
  if (id === root) {
    zoomOut();
    return;
  }
  zoomTo(id, [...trail, [id, `${short(branch.tokens)} tok at ${short(branch.start)}`]]);
}

function zoomOut() {
  if (root === "") return;
  const towards = trail.slice(0, -1);
  zoomTo(towards.at(-1)?.[0] ?? "", towards);
}

function step(key) {
  const shown = [...byId("icicle").children].map((button) => button.dataset.branch);
  const branch = outline.branches[find(selected)];
  if (branch === undefined) return shown[0];
  const inOrder = (parent) => shown.filter((id) => outline.branches[find(id)].parent === parent)
    .toSorted((a, b) => leftOf(a) - leftOf(b));
  const siblings = inOrder(branch.parent);
  const place = siblings.indexOf(selected);
  if (key === "ArrowRight") return siblings[place + 1];
  if (key === "ArrowLeft") return siblings[place - 1];
  if (key === "ArrowUp") return outline.branches[branch.parent]?.id;
  return inOrder(find(selected))[0];
}

const leftOf = (id) => parseFloat(byId("icicle").querySelector(`[data-branch="${CSS.escape(id)}"]`).style.left);

export async function refreshTree() {
  const asked = root;
  const told = await ask(asked ? `admin/tree?root=${asked}` : "admin/tree").catch((error) => {
    if (error.status === 404 && asked !== "") return null; // nobody holds it any more
    throw error;
  });
  if (root !== asked) return; // it was zoomed meanwhile
  if (told === null) {
    root = "";
    trail = [];
    await refreshTree();
    return;
  }
  outline = told;
  if (find(selected) < 0) selected = "";
  draw();
  showNote();
  showSelected();
}

export const redrawTree = () => { if (outline !== null) draw(); };

export function startTree() {
  byId("icicle").addEventListener("click", (event) => {
    const id = event.target.closest("[data-branch]")?.dataset.branch;
    if (id !== undefined) zoomInto(id);
  });
  byId("icicle").addEventListener("focusin", (event) => {
    const id = event.target.dataset.branch;
    if (id !== undefined && id !== selected) select(id);
  });
  byId("icicle").addEventListener("keydown", (event) => {
    if (event.key.startsWith("Arrow")) {
      event.preventDefault();
      const to = step(event.key);
      if (to !== undefined) {
        select(to);
        focusOn(to);
      }
    } else if (event.key === "Escape" || event.key === "Backspace") {
      event.preventDefault();
      zoomOut();
    }
  });
  for (const id of ["width-traffic", "width-held"]) byId(id).addEventListener("change", redrawTree);
}
