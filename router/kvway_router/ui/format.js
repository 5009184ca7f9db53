// Elements and numbers for all parts of the page.
// Every value goes into the page as text (textContent), never as markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const integer = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en") : "–");

export function percent(part, whole) {
  if (!isNumber(part) || !(whole > 0)) return "–";
  const share = (100 * part) / whole;
  return `${share.toFixed(share === 0 || share >= 99.95 ? 0 : 1)}\u00a0%`;
}

// 1,234,567 as 1.23 M: three digits that matter.
export function short(value) {
  if (!isNumber(value)) return "–";
  for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e4, " k"]]) {
    if (value < size) continue;
    const scaled = value / (unit === " k" ? 1e3 : size);
    return `${scaled.toFixed(scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2)}${unit}`;
  }
  return value >= 100 || value % 1 === 0 ? integer(value) : value.toFixed(value < 10 ? 2 : 1);
}

export function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0";
  if (value >= 10) return `${value.toFixed(1)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 0.01) return `${(1000 * value).toFixed(0)} ms`;
  return `${(1000 * value).toFixed(1)} ms`;
}

// How long ago, or for how long: in the largest unit that fits.
export function span(value) {
  if (!isNumber(value)) return "over an hour";
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export const clock = (unix) => new Date(1000 * unix).toLocaleTimeString("en-GB");

export function cell(row, label, text, className) {
  const td = element("td", className, text);
  td.dataset.label = label;
  row.append(td);
  return td;
}

export function pill(text) {
  const safe = String(text).replace(/[^a-z_]/g, "");
  return element("span", `pill ${safe}`, String(text).replaceAll("_", " "));
}

export function setShare(fill, share) {
  fill.style.width = `${100 * Math.min(1, Math.max(0, share || 0))}%`;
}

export function bar(share, className = "fill") {
  const box = element("div", "bar");
  const fill = element("div", className);
  setShare(fill, share);
  box.append(fill);
  return box;
}

export function barCell(row, label, share, text, className) {
  const td = cell(row, label);
  const box = element("div", "with-bar");
  box.append(bar(share, className), element("span", "", text));
  td.append(box);
  return td;
}

// --- replicas have colours -------------------------------------------------------------------

const NUM_COLOURS = 10;
const places = new Map();

export function nameReplicas(names) {
  const gone = [...places.keys()].filter((name) => !names.includes(name));
  for (const name of gone) places.delete(name);
  for (const name of names) {
    if (places.has(name)) continue;
    const taken = new Set(places.values());
    let place = 0;
    while (taken.has(place)) place += 1;
    places.set(name, place);
  }
}

// The colour of a replica, as long as the page is open.
export function colour(name) {
  return places.has(name) ? `var(--r${places.get(name) % NUM_COLOURS})` : "var(--quiet)";
}

export function swatch(name) {
  const made = element("i", "swatch");
  made.style.background = colour(name);
  return made;
}

export function replicaName(name) {
  const made = element("span", "replica");
  made.append(swatch(name), element("span", "mono", name || "none"));
  return made;
}

// Stripes, one below the other: for each [name, share] so much of the width.
export function stripes(holders) {
  const height = 100 / Math.max(1, holders.length);
  return holders
    .map(([name, share], place) => {
      const top = holders.length > 1 ? (100 * place) / (holders.length - 1) : 0;
      return `linear-gradient(${colour(name)} 0 0) 0 ${top}% / ${100 * share}% ${height}% no-repeat`;
    })
    .join(", ");
}

// Lines under text, one below the other: one for each name.
export function underline(names) {
  const step = 26 / names.length;
  const parts = names.map((name, place) =>
    `${colour(name)} ${(74 + place * step).toFixed(1)}% ${(74 + (place + 1) * step).toFixed(1)}%`);
  return `linear-gradient(to bottom, transparent 74%, ${parts.join(", ")})`;
}

// --- asking ----------------------------------------------------------------------------------

const TIMEOUT_MS = 5000;

async function answerOf(path, response) {
  if (response.ok) return response.json();
  let message = `${path}: ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* it was not the router who answered: the status says all */ }
  const error = new Error(message);
  error.status = response.status;
  throw error;
}

export async function ask(path) {
  return answerOf(path, await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) }));
}

export async function post(path, body, timeoutMs = TIMEOUT_MS) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal: AbortSignal.timeout(timeoutMs),
  });
  return { headers: response.headers, body: await answerOf(path, response) };
}
