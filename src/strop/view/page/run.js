// One run: how it goes, what is wrong, where the time went. It follows the run while it is open.
import { explain } from "./alarms.js";
import { Chart, nearest, smooth } from "./charts.js";
import { ask, duration, h, isNumber, kept, link, percent, prose, short, signed, table, visible } from "./dom.js";
import { say } from "./main.js";
import { written } from "./rollouts.js";
import { timeline } from "./timeline.js";

const STAGES = ["generate", "verify", "learn", "sync", "other"];

export class Metrics {
  // From `offset` on news are news: where these columns end, whatever else was asked meanwhile.
  constructor({ columns, offset }) {
    this.columns = new Map(Object.entries(columns));
    this.length = columns.step?.length ?? 0;
    this.offset = offset;
  }
  get steps() { return this.columns.get("step") ?? []; }
  column(name) { return this.columns.get(name) ?? []; }
  has(name) { return this.columns.has(name); }
  add(line) {
    for (const name of Object.keys(line)) if (!this.columns.has(name)) this.columns.set(name, Array(this.length).fill(null));
    for (const [name, values] of this.columns) values.push(line[name] ?? null);
    this.length += 1;
  }
  clear() { this.columns.clear(); this.length = 0; }
  last(name) { return this.column(name).at(-1); }
}

const line = (metrics, name, label, colour = "line", more = {}) => ({ label, colour, x: metrics.steps, y: metrics.column(name), ...more });

// Title, metrics with their labels, whether it is a share. A chart without one number is left out.
const POLICY = [
  ["Reply length (tokens)", [["reply_tokens_mean", "mean"]]],
  ["Entropy (nats per token)", [["entropy_nats", "sampled tokens"], ["policy_entropy_nats", "over the vocabulary", "second"]]],
  ["Engine-trainer drift (nats)", [["drift_mean_nats", "mean"], ["drift_p99_nats", "99th percentile", "faint"], ["offpolicy_mean_nats", "of earlier weights, mean", "second"]]],
  ["Groups without signal", [["zero_variance_frac", "all rewards equal"]], true],
  ["Replies cut at their limit", [["truncated_frac", "cut"]], true],
  ["Gradient norm", [["grad_norm", "largest of the step"]]],
  ["Loss", [["loss", "mean"], ["loss_sft", "demonstrations", "second"]]],
  ["KL (nats per token)", [["reference_kl_nats", "to the reference"], ["approx_kl_nats", "from where the batch began", "second"]]],
  ["Probability ratio of trained tokens", [["ratio_p99", "99th percentile", "faint"], ["ratio_p50", "median"], ["ratio_p01", "1st percentile", "faint"]]],
  ["Tokens stopped at a bound", [["clip_low_frac", "lower"], ["clip_high_frac", "upper", "second"]], true],
  ["How far replies tell their prompts (0: by chance)", [["prompt_dependence", "dependence"]]],
  ["Change of the weights by a step, over the weights", [["update_ratio", "ratio"]]],
  ["Pairs whose better reply gained more", [["pair_accuracy", "pairs"]], true],
];

export async function runView(room, { run: key }) {
  const [run, columns] = await Promise.all([ask("run", { run: key }), ask("metrics", { run: key })]);
  const metrics = new Metrics(columns);
  let told = run;
  const open = (step, mark) => {
    const steps = told.rollout_steps;
    if (mark && told.reply_steps.includes(mark.x)) location.hash = link(["run", key, "eval", mark.x]);
    else if (steps.length) location.hash = link(["run", key, "step", steps[nearest(steps, step)]]);
  };
  const head = h("div"), alarms = h("section", { "aria-labelledby": "alarms" }), outcome = h("div", { class: "charts large" }), policy = h("div", { class: "charts" }), speed = h("div", { class: "charts" }),
    samples = h("div", { class: "charts" }), parts = h("div", { class: "charts" }), rest = h("div", { class: "charts" }), facts = h("div"), lanes = h("div");
  const charts = [], section = (id, title, ...content) => h("section", { "aria-labelledby": id }, h("h2", { id }, title), ...content);
  const add = (place, options) => { const chart = new Chart({ open, ...options }); charts.push(chart); place.append(chart.figure); return chart; };
  const held = () => told.evals.filter((one) => isNumber(one.accuracy)).map((one) => ({
    x: one.step, y: one.accuracy, low: one.low, high: one.high, name: "held out, 95% interval",
    label: `held out ${percent(one.accuracy)} (95% interval ${percent(one.low)} to ${percent(one.high)})${one.is_valid ? "" : `, ${one.validity}`}` }));
  const twice = (name, label) => () => [line(metrics, name, `${label}, each step`, "faint", { isFaint: true }), { label: "mean of 5 steps", colour: "line", x: metrics.steps, y: smooth(metrics.column(name)) }];

  const known = new Set();
  function build() {
    const fresh = [...metrics.columns.keys()].filter((name) => !known.has(name));
    if (!fresh.length) return;
    const begins = (name) => fresh.includes(name);
    fresh.forEach((name) => known.add(name));
    if (begins("accuracy") || (begins("step") && !metrics.has("reward_mean"))) add(outcome, { title: "Accuracy", series: twice("accuracy", "training"), points: held, isShare: true });
    if (begins("reward_mean")) add(outcome, { title: "Reward", series: twice("reward_mean", "mean") });
    for (const [title, names, isShare] of POLICY) if (names.some(([name]) => begins(name))) add(policy, { title, isShare, series: () => names.map(([name, label, colour]) => line(metrics, name, label, colour ?? "line", { isFaint: colour === "faint" })) });
    if (begins("seconds_step")) {
      add(speed, { title: "Where a step's time goes (s)", unit: " s", series: () => STAGES.map((stage, i) => line(metrics, `seconds_${stage}`, stage, `stage-${i}`, { isArea: true })) });
      add(speed, { title: "Trained tokens per second", series: () => [line(metrics, "scored_tokens_per_s", "of the whole step")] });
    }
    if (begins("staleness_mean")) add(samples, { title: "Staleness (steps behind the weights)", series: () => [line(metrics, "staleness_mean", "mean"), line(metrics, "staleness_max", "oldest", "second")] });
    const fates = () => [...metrics.columns.keys()].filter((name) => /^num_[a-z]+_groups$/.test(name));
    if (fresh.some((name) => /^num_[a-z]+_groups$/.test(name)) && !samples.querySelector("[data-fate]")) add(samples, { title: "What became of groups", series: () => fates().map((name, i) => line(metrics, name, name.slice(4, -7), `stage-${i % 5}`, { isArea: true })) }).figure.dataset.fate = "";
    if (begins("wasted_token_frac")) add(samples, { title: "Sampled tokens that nothing learned from", isShare: true, series: () => [line(metrics, "wasted_token_frac", "wasted")] });
    for (const name of fresh) if (/^(reward_part_|reward_mean_|accuracy_|reply_tokens_mean_)/.test(name)) add(parts, { title: visible(name), isShare: name.startsWith("accuracy_"), series: () => [line(metrics, name, "mean")] });
    for (const place of [outcome, policy, speed, samples, parts]) place.parentElement && (place.parentElement.hidden = !place.children.length);
  }

  const other = h("details", { ontoggle: () => { if (other.open && !rest.children.length) for (const name of [...metrics.columns.keys()].sort()) if (name !== "step") add(rest, { title: name, series: () => [line(metrics, name, name)] }); } }, h("summary", {}, "Every recorded number"), rest);
  const search = h("input", { type: "search", placeholder: "a text in prompts and replies", "aria-label": "search in rollouts", "data-key": "/" });
  room.append(head, alarms, section("outcome", "How it goes", outcome), section("policy", "What the policy does", policy), section("speed", "Where the time goes", speed, lanes),
    section("samples", "What became of samples", samples), section("parts", "By part", parts),
    section("rollouts", "Rollouts", kept ? await written(key, run.rollout_steps) : [h("p", { class: "soft" }, "A click on a step of any curve opens its rollouts."),
      h("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); location.hash = link(["run", key, "search"], { text: search.value }); } }, h("label", {}, "search all steps", search), h("button", {}, "search"), stepChooser(() => told.rollout_steps, key))]),
    facts, other);
  build();
  showHead(head, told, metrics); showAlarms(alarms, told, key); showFacts(facts, told);
  for (const place of [outcome, policy, speed, samples, parts]) place.parentElement.hidden = !place.children.length;
  const stopLanes = timeline(lanes, { run: key, metrics, open });
  const redraw = () => { build(); charts.forEach((chart) => chart.later()); showHead(head, told, metrics); };
  const stop = followNews(key, `${metrics.offset}.${run.events_offset}`, {
    metrics: (content) => { metrics.add(content); redraw(); },
    restart: (content) => { if (content.log === "metrics") metrics.clear(); redraw(); },
    refresh: async () => { told = await ask("run", { run: key }); showAlarms(alarms, told, key); showFacts(facts, told); redraw(); },
  }, () => metrics.steps.at(-1));
  return () => { stop(); stopLanes(); };
}

function stepChooser(steps, key) {
  const box = h("input", { type: "number", min: "0", "aria-label": "step", style: { width: "7rem" } });
  return h("label", {}, "or open step", box, h("button", { type: "button", onclick: () => { const found = steps(); if (found.length) location.hash = link(["run", key, "step", found[nearest(found, Number(box.value))]]); } }, "open"));
}

// News come in order; where the connection breaks, the browser asks on from the last one.
function followNews(key, cursor, heard, lastStep) {
  if (kept) { say(kept.made); return () => {}; }
  const source = new EventSource(`api/news?${new URLSearchParams({ run: key, from: cursor })}`);
  let refreshing = null;
  const refresh = () => { clearTimeout(refreshing); refreshing = setTimeout(() => heard.refresh().catch((error) => say(error.message, "lost")), 150); };
  const tell = () => say(lastStep() === undefined ? "following" : `following, step ${lastStep()}`, "live");
  source.onopen = tell;
  source.onerror = () => say("connection lost, trying again", "lost");
  source.addEventListener("metrics", (event) => { heard.metrics(JSON.parse(event.data)); tell(); refresh(); });
  source.addEventListener("restart", (event) => { heard.restart(JSON.parse(event.data)); refresh(); });
  source.addEventListener("event", refresh);
  source.addEventListener("state", refresh);
  return () => { clearTimeout(refreshing); source.close(); };
}

function showHead(place, run, metrics) {
  const step = metrics.steps.at(-1) ?? 0, wanted = run.wanted_steps ?? step, times = metrics.column("seconds_step").slice(-10).filter(isNumber);
  const left = run.phase === "running" && times.length ? `, about ${duration((times.reduce((a, b) => a + b, 0) / times.length) * (wanted - step))} left` : "";
  const first = run.evals[0], last = run.evals.at(-1), change = run.change;
  const end = (one, name) => h("div", { class: name }, h("div", { class: "value" }, percent(one.accuracy)), h("div", {}, `${name} (step ${one.step})`), h("div", { class: "soft small" }, `${percent(one.low)} to ${percent(one.high)}`));
  let verdict = null;
  if (change) verdict = h("div", { class: "verdict" }, h("b", {}, `${signed(change.estimate)} points`), h("div", { class: "small" }, `95% interval ${signed(change.low)} to ${signed(change.high)}, the same ${last.num_examples} held-out examples, greedy`));
  place.replaceChildren(
    h("h1", {}, visible(run.key)),
    h("p", { class: "soft" }, visible(run.model ?? ""), run.task ? h("span", {}, " learning ", h("b", {}, visible(run.task))) : null, run.algorithm ? ` by ${visible(run.algorithm)}` : ""),
    h("p", {}, h("b", {}, run.phase), `: ${step} of ${wanted} steps${left}`, run.num_attempts > 1 ? `, attempt ${run.num_attempts}` : ""),
    run.plot_range ? h("p", { class: "soft small" }, run.plot_range) : "",
    h("div", { class: "progress", role: "progressbar", "aria-label": "steps", "aria-valuemin": "0", "aria-valuemax": wanted, "aria-valuenow": step }, h("i", { style: { width: `${wanted ? Math.min(100, (100 * step) / wanted) : 0}%` } })),
    first ? h("div", { class: "headline" }, first !== last ? end(first, "before") : null, end(last, first === last ? "measured" : "after"), verdict) : h("p", { class: "soft" }, "No held-out accuracy is measured yet."));
}

function showAlarms(place, run, key) {
  const isOpen = new Set([...place.querySelectorAll("details[open]")].map((one) => one.dataset.name));
  const steps = run.rollout_steps, at = (step) => (steps.length ? h("a", { href: link(["run", key, "step", steps[nearest(steps, step)]]) }, `step ${step}`) : `step ${step}`);
  place.replaceChildren(h("h2", { id: "alarms" }, run.alarms.length ? `Alarms (${run.alarms.length})` : "Alarms"), ...(run.alarms.length ? run.alarms.map((alarm) => h("div", { class: "card alarm" },
    h("b", {}, visible(alarm.cause)), " ", h("span", { class: "soft" }, `${alarm.num_times} ${alarm.num_times === 1 ? "time" : "times"}, `, at(alarm.first_step), alarm.last_step !== alarm.first_step ? [" to ", at(alarm.last_step)] : null),
    alarm.detail ? h("p", {}, visible(alarm.detail)) : null, explain(alarm) ? h("details", { class: "small", "data-name": alarm.cause, open: isOpen.has(alarm.cause) }, h("summary", {}, "what it means, and what to do"), h("p", {}, explain(alarm))) : null)) : [h("p", { class: "card calm" }, "No alarm was raised.")]));
}

function showFacts(place, run) {
  // Not under the hands of somebody who writes.
  if (place.contains(document.activeElement) && document.activeElement.tagName === "TEXTAREA") return;
  const isOpen = new Set([...place.querySelectorAll("details[open]")].map((one) => one.dataset.name));
  const fold = (name, title, content) => h("details", { "data-name": name, open: isOpen.has(name) }, h("summary", {}, title), content);
  const gate = run.gate.map((one) => [one.cause, one.detail]), log = run.log.map((one) => [one.step, one.cause, one.detail]);
  place.replaceChildren(h("section", { "aria-labelledby": "facts" }, h("h2", { id: "facts" }, "What it is, what it cost"),
    run.compared.length ? h("div", {}, h("h3", {}, "Predicted and actual"), table(["", "planned", "measured", "measured / planned"], run.compared.map((one) => [one.name, one.planned, one.measured, one.ratio === null ? "–" : one.ratio.toFixed(2)]), { label: "Predicted and actual" })) : null,
    table(["fact", "value"], run.facts, { label: "Facts" }),
    run.evals.length ? fold("evals", `Evaluations (${run.evals.length})`, table(["step", "greedy", "95% interval", "sampled", "cut replies", "verdict"], run.evals.map((one) => [run.reply_steps.includes(one.step) ? h("a", { href: link(["run", run.key, "eval", one.step]) }, `step ${one.step}`) : `step ${one.step}`, percent(one.accuracy), `${percent(one.low)} to ${percent(one.high)}`, percent(one.sampled), percent(one.truncated), one.validity]), { label: "Evaluations" })) : null,
    gate.length ? fold("gate", `Gate: ${gate.length} checks before the first step`, table(["check", "what it found"], gate, { label: "Gate" })) : null,
    run.audit ? fold("audit", `Audit of the task: ${visible(run.audit.verdict)}`, table(["probe", "result", "what it earned", "limit", "of", "detail"], (run.audit.probes ?? []).map((one) => [one.probe, one.status, short(one.value), short(one.limit), one.num ?? "–", one.detail ?? ""]), { label: "Audit" })) : null,
    log.length ? fold("log", `Notices (${log.length})`, table(["step", "what", "detail"], log, { label: "Notices" })) : null,
    fold("notes", run.notes ? "Notes" : "Notes (none)", h("div", {}, run.writes_notes ? notesForm(run) : run.notes ? prose(run.notes) : null,
      h("p", { class: "soft small" }, "Notes are the file ", h("code", {}, visible(run.notes_path)), run.writes_notes ? "." : ": write it with any editor, or start the page with --notes."))),
    fold("spec", "Settings", prose(run.spec))));
}

function notesForm(run) {
  const box = h("textarea", { rows: "8", "aria-label": "notes", style: { width: "100%", maxWidth: "50rem" } }), told = h("span", { class: "soft small", role: "status" });
  box.value = run.notes;
  const save = async (event) => {
    event.preventDefault();
    const answer = await fetch(`api/notes?${new URLSearchParams({ run: run.key })}`, { method: "PUT", headers: { "x-strop": "notes" }, body: box.value });
    told.textContent = answer.ok ? " saved" : ` not saved: ${(await answer.text()).slice(0, 300)}`;
  };
  return h("form", { onsubmit: save }, box, h("div", {}, h("button", {}, "save notes"), told));
}
