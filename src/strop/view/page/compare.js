// Runs beside each other: their curves in one chart each, and the paired change of their last evaluations.
import { Chart, smooth } from "./charts.js";
import { ask, h, isNumber, kept, link, percent, signed, table, visible } from "./dom.js";
import { say } from "./main.js";
import { Metrics } from "./run.js";

const SHOWN = [["Training accuracy, mean of 5 steps", "accuracy", true], ["Reward, mean of 5 steps", "reward_mean"], ["Reply length (tokens)", "reply_tokens_mean"], ["Entropy (nats per token)", "entropy_nats"], ["Loss", "loss"], ["Engine-trainer drift (nats)", "drift_mean_nats"],
  ["Groups without signal", "zero_variance_frac", true], ["Gradient norm", "grad_norm"], ["Step time (s)", "seconds_step"], ["Trained tokens per second", "scored_tokens_per_s"]];
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [1, 4], [12, 4]];

export async function compareView(room, { all }) {
  const keys = all.getAll("run");
  if (keys.length < 2) throw new Error("Choose at least two runs in the list of runs.");
  const [told, ...answers] = await Promise.all([ask("compare", { run: keys }), ...keys.map((key) => ask("metrics", { run: key }))]);
  const metrics = answers.map((columns) => new Metrics(columns)), grid = h("div", { class: "charts" });
  const lasts = told.runs.map((run) => [h("a", { href: link(["run", run.key]) }, visible(run.key)), run.last ? run.last.step : "–", percent(run.last?.accuracy), run.last ? `${percent(run.last.low)} to ${percent(run.last.high)}` : "no evaluation", run.last?.num_examples ?? "–"]);
  const changes = told.changes.map((one) => [one.arm, one.replies, `${signed(one.estimate)} points`, `${signed(one.low)} to ${signed(one.high)}`, `${one.num_gained} / ${one.num_lost} of ${one.num_examples}`, isNumber(one.p_value) ? one.p_value.toPrecision(2) : "–",
    one.over_seeds ? `${signed(one.over_seeds.low)} to ${signed(one.over_seeds.high)}` : "–", one.low > 0 ? "better" : one.high < 0 ? "worse" : "no difference shown"]);
  room.append(h("h1", {}, `${keys.length} runs compared`), table(["run", "step", "held-out accuracy", "95% interval", "examples"], lasts, { label: "Last evaluations" }),
    h("h2", {}, "Change on the same examples", told.changes.length ? ` against ${visible(told.changes[0].against)}` : ""),
    told.error ? h("p", { class: "card alarm" }, visible(told.error)) : table(["run", "replies", "change", "95% interval", "gained / lost", "p (Holm)", "interval over seeds", "verdict"], changes, { label: "Paired changes" }),
    ...told.notes.map((note) => h("p", { class: "soft small" }, visible(note))), h("p", { class: "soft small" }, "Intervals are over problems: what another seed would change is in the interval over seeds alone, where there are several."),
    h("h2", {}, "Curves"), grid, h("h2", {}, "Settings that differ"), told.settings.length ? table(["setting", ...keys], told.settings.map((one) => [one.key, ...one.values]), { label: "Settings that differ" }) : h("p", {}, "None."));
  for (const [title, name, isShare] of SHOWN) {
    if (!metrics.some((one) => one.column(name).some(isNumber))) continue;
    const isSmooth = title.includes("mean of 5");
    const chart = new Chart({ title, isShare, series: () => metrics.map((one, i) => ({ label: visible(keys[i]), colour: `run-${i % 6}`, dash: DASHES[i % 6], x: one.steps, y: isSmooth ? smooth(one.column(name)) : one.column(name) })) });
    grid.append(chart.figure);
  }
  say(kept?.made ?? `${keys.length} runs`);
}
