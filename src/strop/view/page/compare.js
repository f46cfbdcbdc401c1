// Runs beside each other: their curves in one chart each, and the paired change of their last evaluations.
import { Chart, smooth } from "./charts.js";
import { ask, h, isNumber, link, percent, signed, table, visible } from "./dom.js";
import { say } from "./main.js";
import { Metrics } from "./run.js";

const SHOWN = [["Training accuracy, mean of 5 steps", "accuracy", true], ["Reward, mean of 5 steps", "reward_mean"], ["Reply length (tokens)", "reply_tokens_mean"], ["Entropy (nats per token)", "entropy_nats"], ["Loss", "loss"], ["Engine-trainer drift (nats)", "drift_mean_nats"],
  ["Groups without signal", "zero_variance_frac", true], ["Gradient norm", "grad_norm"], ["Step time (s)", "seconds_step"], ["Trained tokens per second", "scored_tokens_per_s"]];
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [1, 4], [12, 4]];

export async function compareView(room, { all }) {
  const keys = all.getAll("run");
  if (keys.length < 2) throw new Error("Choose at least two runs in the list of runs.");
  const [told, ...blocks] = await Promise.all([ask("compare", { run: keys }), ...keys.map((key) => ask("metrics", { run: key }, { binary: true }))]);
  const metrics = blocks.map((block) => new Metrics(block)), grid = h("div", { class: "charts" }), charts = [];
  const lasts = told.runs.map((run) => [h("a", { href: link(["run", run.key]) }, visible(run.key)), run.last ? run.last.step : "–", percent(run.last?.accuracy), run.last ? `${percent(run.last.low)} to ${percent(run.last.high)}` : "no evaluation", run.last?.num_examples ?? "–"]);
  const changes = told.compared.map((one) => {
    const change = one.change;
    if (one.error || !change) return [one.key, "–", "–", "–", "–", one.error ?? "no greedy replies"];
    return [one.key, `${signed(change.estimate)} points`, `${signed(change.low)} to ${signed(change.high)}`, `${change.num_gained} / ${change.num_lost} of ${change.num_examples}`, change.p_value === null ? "–" : change.p_value.toPrecision(2),
      change.low > 0 ? "better" : change.high < 0 ? "worse" : "no difference shown"];
  });
  const names = [...new Set(told.runs.flatMap((run) => Object.keys(run.spec)))].sort();
  const differing = names.filter((name) => new Set(told.runs.map((run) => run.spec[name])).size > 1 && name !== "name" && !name.startsWith("output."));
  room.append(h("h1", {}, `${keys.length} runs compared`), table(["run", "step", "held-out accuracy", "95% interval", "examples"], lasts, { label: "Last evaluations" }),
    h("h2", {}, "Change against the first, on the same examples"), table(["run", "change", "95% interval", "gained / lost", "p", "verdict"], changes, { label: "Paired changes" }),
    h("p", { class: "soft small" }, told.note ?? "Paired over problems, greedy replies. Intervals are of one seed each: what another seed would change is not in them."),
    h("h2", {}, "Curves"), grid, h("h2", {}, "Settings that differ"), differing.length ? table(["setting", ...keys], differing.map((name) => [name, ...told.runs.map((run) => run.spec[name] ?? "not set")]), { label: "Settings that differ" }) : h("p", {}, "None."));
  for (const [title, name, isShare] of SHOWN) {
    if (!metrics.some((one) => one.column(name).some(isNumber))) continue;
    const isSmooth = title.includes("mean of 5");
    const chart = new Chart({ title, isShare, series: () => metrics.map((one, i) => ({ label: visible(keys[i]), colour: `run-${i % 6}`, dash: DASHES[i % 6], x: one.steps, y: isSmooth ? smooth(one.column(name)) : one.column(name) })) });
    charts.push(chart); grid.append(chart.figure);
  }
  say(`${keys.length} runs`);
}
