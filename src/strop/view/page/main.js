// Which view is shown follows from the address behind '#'. Theme, keys, and what a view leaves behind when it goes.
import { forgetCharts, redrawAll } from "./charts.js";
import { compareView } from "./compare.js";
import { h, kept, link } from "./dom.js";
import { readerView, searchView, stepView } from "./rollouts.js";
import { runView } from "./run.js";
import { runsView } from "./runs.js";

const main = document.getElementById("main"), crumbs = document.getElementById("crumbs"), pulse = document.getElementById("pulse");
let leave = null, turn = 0;
// How far each entry of the history was scrolled.
const scrolled = new Map();
history.scrollRestoration = "manual";
window.addEventListener("scroll", () => { if (scrolled.has(history.state?.place) && main.dataset.view === location.hash) scrolled.set(history.state.place, window.scrollY); });

export function say(text, kind = "") {
  pulse.textContent = text;
  pulse.className = kind;
}

function parse() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: Object.fromEntries(new URLSearchParams(query)), all: new URLSearchParams(query) };
}

async function show() {
  const place = parse(), [kind, run, of, step, index] = place.parts, mine = (turn += 1);
  leave?.();
  leave = null;
  forgetCharts();
  say("");
  let view = runsView;
  if (kind === "compare") view = compareView;
  else if (kind === "run" && place.parts[2] === "search") view = searchView;
  else if (kind === "run" && index !== undefined) view = readerView;
  else if (kind === "run" && step !== undefined) view = stepView;
  else if (kind === "run") view = runView;
  const names = [];
  if (kind === "run") names.push([run, link(["run", run])]);
  if (kind === "run" && step !== undefined) names.push([of === "eval" ? `held out, step ${step}` : `step ${step}`, link(["run", run, of, step])]);
  if (index !== undefined) names.push([`rollout ${index}`, location.hash]);
  if (kind === "compare") names.push(["comparison", location.hash]);
  if (place.parts[2] === "search") names.push(["search", location.hash]);
  crumbs.replaceChildren(h("a", { href: "#/" }, "runs"), ...names.map(([text, href], i) =>
    h("a", { href, "aria-current": i === names.length - 1 ? "page" : null }, text)));
  document.title = ["strop", ...names.map(([text]) => text)].reverse().join(" · ");
  const room = h("div");
  try {
    const going = await view(room, { run, of, step: Number(step), index, query: place.query, all: place.all });
    if (mine !== turn) { going?.(); return; }
    leave = going ?? null;
  } catch (error) {
    if (mine !== turn) return;
    room.replaceChildren(h("p", { class: "card alarm", role: "alert" }, error.message));
  }
  main.replaceChildren(room);
  main.dataset.view = location.hash;
  const target = document.querySelector("[data-focus]");
  // Back and forward lead to where one was, a link to the top.
  const isBack = scrolled.has(history.state?.place), top = scrolled.get(history.state?.place) ?? 0;
  if (!isBack) history.replaceState({ place: `${Date.now()}.${turn}` }, "");
  if (target && !isBack) { target.scrollIntoView({ block: "nearest" }); target.focus({ preventScroll: true }); } else { main.focus({ preventScroll: true }); window.scrollTo(0, top); }
  scrolled.set(history.state.place, top);
}

// Themes: the system's, or one that is kept in this browser.
const THEMES = ["system", "light", "dark"], button = document.getElementById("theme");
function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
  button.textContent = `Theme: ${name}`;
  try { localStorage.setItem("strop.theme", name); } catch { /* a browser that keeps nothing */ }
  redrawAll();
}
let theme = "system";
try { theme = localStorage.getItem("strop.theme") ?? "system"; } catch { /* as above */ }
setTheme(THEMES.includes(theme) ? theme : "system");
const nextTheme = () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % 3]);
button.addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

const keys = document.getElementById("keys");
document.getElementById("help").addEventListener("click", () => keys.showModal());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
  if (event.target.closest?.("input, select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
  const { parts } = parse(), press = (name) => { const found = document.querySelector(`[data-key="${name}"]`); if (found) { event.preventDefault(); found.tagName === "INPUT" ? found.focus() : found.click(); } };
  if (event.key === "?") keys.showModal();
  else if (event.key === "t") nextTheme();
  else if (event.key === "g") location.hash = "#/";
  else if (event.key === "u") location.hash = parts.length === 5 ? link(parts.slice(0, 4)) : parts.length > 2 ? link(parts.slice(0, 2)) : "#/";
  else if (["j", "k", "[", "]", "/"].includes(event.key)) press(event.key);
});

// Rows that are links as a whole, and moving over them.
export function moveRow(by) {
  const rows = [...document.querySelectorAll("tr[data-href]:not([hidden])")];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement?.closest?.("tr[data-href]"));
  const next = rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + by, 0), rows.length - 1)];
  next.querySelector("a").focus();
}

if (kept && !location.hash) location.replace(kept.start);
window.addEventListener("hashchange", show);
show();
