// Elements, words and numbers. Texts of models only ever become text nodes.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Control characters and direction marks, which act on a reader's screen or hide from him, become visible ones.
const HARMFUL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

export function visible(text) {
  return String(text).replaceAll("\r\n", "\n").replace(HARMFUL, (found) => {
    const code = found.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
  });
}

const MOST_CHARACTERS = 100000;

// A text as it is written. Of a very long one the beginning, and the rest when it is asked for.
export function prose(text, attributes = {}) {
  const whole = visible(text);
  const block = h("pre", attributes, whole.slice(0, MOST_CHARACTERS));
  if (whole.length <= MOST_CHARACTERS) return block;
  const more = h("button", { type: "button", onclick: () => { block.textContent = whole; more.remove(); } },
    `show all ${whole.length.toLocaleString("en")} characters`);
  return h("div", {}, block, more);
}

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const percent = (value, digits = 1) => (isNumber(value) ? `${(value * 100).toFixed(digits)}%` : "–");
export const signed = (value) => (isNumber(value) ? `${value >= 0 ? "+" : "−"}${Math.abs(value * 100).toFixed(1)}` : "–");

export function short(value) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return Number(value.toPrecision(size >= 1000 ? 6 : 4)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.round(seconds) % 60).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function instant(seconds) {
  return seconds ? new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : "–";
}

// What is wider than its place is moved within it, also by keys.
export const scroll = (label, content) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);

export function table(heads, rows, attributes = {}) {
  const numbers = heads.map((_, index) => rows.length && rows.every((row) => /^[–+−-]?[\d.,%]*$/.test(String(row[index]))));
  const kind = (index) => (numbers[index] ? "number" : null);
  return scroll(attributes.label ?? heads.join(", "),
    h("table", {}, h("thead", {}, h("tr", {}, heads.map((text, i) => h("th", { scope: "col", class: kind(i) }, text)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) =>
        h("td", { class: kind(i) }, cell instanceof Node ? cell : visible(cell ?? "–"))))))));
}

// A button, and a place below which shows what `make` returns while the button is pressed.
export function unfold(label, make) {
  const place = h("div"), button = h("button", { type: "button", "aria-expanded": "false", onclick: () => {
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    place.replaceChildren(...(isOpen ? [] : [make()]));
  } }, label);
  return [button, place];
}

// A report holds the answers to what is asked, and asks nobody.
const content = document.getElementById("kept")?.textContent;
export const kept = content ? JSON.parse(content) : null;

function recall(path, parameters) {
  const answer = kept.answers[JSON.stringify([path, ...Object.values(parameters).flat().map(String)])];
  if (answer === undefined) throw new Error("This report does not hold that: `strop view` shows the whole run.");
  return answer;
}

export async function ask(path, parameters = {}) {
  if (kept) return recall(path, parameters);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) for (const one of [value].flat()) query.append(name, one);
  const answer = await fetch(`api/${path}?${query}`);
  if (!answer.ok) {
    const told = await answer.text();
    let message = told;
    try { message = JSON.parse(told).error; } catch { /* a plain refusal */ }
    throw new Error(message);
  }
  return answer.json();
}

// Deep links: the place is in the address behind '#', its filters behind '?'.
export const link = (parts, query = {}) => {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null));
  return `#/${parts.map(encodeURIComponent).join("/")}${words.size ? `?${words}` : ""}`;
};

export function choice(name, label, options, value, onchange) {
  return h("label", {}, label, h("select", { name, onchange: (event) => onchange(event.target.value) }, Object.entries(options).map(([key, [text]]) => h("option", { value: key, selected: key === value }, text))));
}
