// The list of runs, and choosing some to compare.
import { ask, choice, h, instant, kept, link, percent, scroll, short, visible } from "./dom.js";
import { moveRow, say } from "./main.js";

const ORDERS = {
  begun: ["newest first", (a, b) => b.created_at - a.created_at],
  name: ["name", (a, b) => a.key.localeCompare(b.key)],
  accuracy: ["held-out accuracy", (a, b) => (b.accuracy ?? -1) - (a.accuracy ?? -1)],
  reward: ["last reward", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
  task: ["task", (a, b) => (a.task ?? "").localeCompare(b.task ?? "")],
};

export async function runsView(room, { query }) {
  const chosen = new Set();
  let all = [], state = { text: "", sort: "begun", ...query };
  const search = h("input", { type: "search", value: state.text, placeholder: "name, task, model or state", "data-key": "/", "aria-label": "search in runs", oninput: () => change({ text: search.value }) });
  const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = `#/compare?${new URLSearchParams([...chosen].map((key) => ["run", key]))}`; } }, "compare the chosen runs");
  const body = h("tbody"), empty = h("p", { class: "soft" });
  room.append(h("h1", {}, "Runs"), h("div", { class: "filters" }, search, choice("sort", "order", ORDERS, state.sort, (sort) => change({ sort })), compare,
    h("button", { type: "button", hidden: true, "data-key": "j", onclick: () => moveRow(1) }, "next"), h("button", { type: "button", hidden: true, "data-key": "k", onclick: () => moveRow(-1) }, "previous")),
  scroll("Runs", h("table", { class: "wide" }, h("thead", {}, h("tr", {},
    ["", "run", "state", "steps", "held-out accuracy", "95% interval", "last reward", "task", "model", "begun"].map((text) => h("th", { scope: "col" }, text || h("span", { class: "soft" }, "compare"))))), body)), empty);

  function row(run) {
    const box = h("input", { type: "checkbox", "aria-label": `compare ${run.key}`, checked: chosen.has(run.key), onchange: () => { box.checked ? chosen.add(run.key) : chosen.delete(run.key); compare.disabled = chosen.size < 2; } });
    if (run.error) return h("tr", {}, h("td"), h("td", {}, run.key), h("td", { class: "bad" }, "damaged"), h("td", { colspan: "7" }, visible(run.error)));
    return h("tr", { "data-href": "" }, h("td", {}, box), h("th", { scope: "row" }, h("a", { href: link(["run", run.key]) }, visible(run.key))), h("td", {}, run.phase), h("td", { class: "number" }, run.num_steps),
      h("td", { class: "number" }, percent(run.accuracy)), h("td", {}, run.low === null ? "–" : `${percent(run.low)} to ${percent(run.high)}`), h("td", { class: "number" }, short(run.reward)),
      h("td", {}, visible(run.task ?? "–")), h("td", {}, visible(run.model ?? "–")), h("td", {}, instant(run.created_at)));
  }
  function draw() {
    const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = all.filter((run) => words.every((word) => [run.key, run.task, run.model, run.phase].join(" ").toLowerCase().includes(word)));
    body.replaceChildren(...shown.sort((ORDERS[state.sort] ?? ORDERS.begun)[1]).map(row));
    empty.textContent = shown.length ? "" : all.length ? "No run is like that." : "No run is here yet. `strop train RUN.toml` begins one; it appears here by itself.";
    say(shown.length < all.length ? `${shown.length} of ${all.length} runs` : `${all.length} ${all.length === 1 ? "run" : "runs"}`);
  }
  function change(more) {
    state = { ...state, ...more };
    history.replaceState(history.state, "", link([], { ...state, sort: state.sort === "begun" ? "" : state.sort }));
    draw();
  }
  async function load() {
    all = await ask("runs");
    if (!body.contains(document.activeElement)) draw();
    return all;
  }
  const runs = await load();
  if (kept) return null;
  // Where there is one run only, it is what is meant.
  if (runs.length === 1 && !runs[0].error && !sessionStorage.getItem("strop.listed")) location.replace(link(["run", runs[0].key]));
  sessionStorage.setItem("strop.listed", "yes");
  const timer = setInterval(() => load().catch((error) => say(error.message, "lost")), 5000);
  return () => clearInterval(timer);
}
