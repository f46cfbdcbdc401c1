// The list of runs, and choosing some to compare.
import { ask, h, instant, link, percent, short, visible } from "./dom.js";
import { moveRow, say } from "./main.js";

export async function runsView(room) {
  const chosen = new Set();
  const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = `#/compare?${new URLSearchParams([...chosen].map((key) => ["run", key]))}`; } }, "compare the chosen runs");
  const body = h("tbody"), empty = h("p", { class: "soft" });
  room.append(h("h1", {}, "Runs"), h("div", { class: "filters" }, compare,
    h("button", { type: "button", hidden: true, "data-key": "j", onclick: () => moveRow(1) }, "next"), h("button", { type: "button", hidden: true, "data-key": "k", onclick: () => moveRow(-1) }, "previous")),
  h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, h("table", { class: "wide" }, h("thead", {}, h("tr", {},
    ["", "run", "state", "steps", "held-out accuracy", "95% interval", "last reward", "task", "model", "begun"].map((text) => h("th", { scope: "col" }, text || h("span", { class: "soft" }, "compare"))))), body)), empty);

  function row(run) {
    const box = h("input", { type: "checkbox", "aria-label": `compare ${run.key}`, checked: chosen.has(run.key), onchange: () => { box.checked ? chosen.add(run.key) : chosen.delete(run.key); compare.disabled = chosen.size < 2; } });
    if (run.error) return h("tr", {}, h("td"), h("td", {}, run.key), h("td", { class: "bad" }, "damaged"), h("td", { colspan: "7" }, visible(run.error)));
    return h("tr", { "data-href": "" }, h("td", {}, box), h("th", { scope: "row" }, h("a", { href: link(["run", run.key]) }, visible(run.key))), h("td", {}, run.phase), h("td", { class: "number" }, run.num_steps),
      h("td", { class: "number" }, percent(run.accuracy)), h("td", {}, run.low === null ? "–" : `${percent(run.low)} to ${percent(run.high)}`), h("td", { class: "number" }, short(run.reward)),
      h("td", {}, visible(run.task ?? "–")), h("td", {}, visible(run.model ?? "–")), h("td", {}, instant(run.created_at)));
  }
  async function load() {
    const runs = await ask("runs");
    if (!body.contains(document.activeElement)) body.replaceChildren(...runs.map(row));
    empty.textContent = runs.length ? "" : "No run is here yet. `strop train RUN.toml` begins one; it appears here by itself.";
    say(`${runs.length} ${runs.length === 1 ? "run" : "runs"}`);
    return runs;
  }
  const runs = await load();
  // Where there is one run only, it is what is meant.
  if (runs.length === 1 && !runs[0].error && !sessionStorage.getItem("strop.listed")) location.replace(link(["run", runs[0].key]));
  sessionStorage.setItem("strop.listed", "yes");
  const timer = setInterval(() => load().catch((error) => say(error.message, "lost")), 5000);
  return () => clearInterval(timer);
}
