// Rollouts: a step's list, a search over all steps, and one of them turn by turn and token by token.
import { ask, choice, h, isNumber, kept, link, percent, prose, scroll, short, table, visible } from "./dom.js";
import { moveRow, say } from "./main.js";

const hidden = (key, action) => h("button", { type: "button", hidden: true, "data-key": key, onclick: action }, key);
const verdict = (row) => (row.failure ? "unscored" : row.is_correct === true ? "solved" : row.is_correct === false ? "not solved" : isNumber(row.reward) ? "scored" : "unscored");
const tone = (text) => ({ solved: "good", "not solved": "bad", unscored: "soft" })[text] ?? "";
const oneLine = (text) => visible(text).replace(/\s+/g, " ");

const ORDERS = {
  group: ["by prompt", null],
  reward: ["reward, highest first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
  "reward-up": ["reward, lowest first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity)],
  long: ["longest first", (a, b) => b.num_sampled_tokens - a.num_sampled_tokens],
  short: ["shortest first", (a, b) => a.num_sampled_tokens - b.num_sampled_tokens],
  stale: ["oldest weights first", (a, b) => (b.staleness ?? 0) - (a.staleness ?? 0)],
};
const OUTCOMES = {
  "": ["all", () => true], solved: ["solved", (row) => verdict(row) === "solved"], wrong: ["not solved", (row) => verdict(row) === "not solved"], unscored: ["unscored", (row) => verdict(row) === "unscored"],
  cut: ["cut at the limit", (row) => row.truncated], form: ["not in the asked form", (row) => row.format_ok === false], late: ["out of time", (row) => row.timed_out], untrained: ["not trained on", (row) => row.status && row.status !== "trained"],
};

// What differs between prompts: a system prompt that all of them begin with, and how all end, say nothing.
function tellApart(rows) {
  const shared = (texts) => { let n = 0; while (texts.length > 1 && texts.every((text) => n < text.length && text[n] === texts[0][n])) n += 1; return n; };
  const reversed = (text) => text.split("").reverse().join("");
  const heads = [...new Set(rows.map((row) => row.prompt))], tails = [...new Set(rows.map((row) => row.prompt_end))];
  const ending = shared(tails.map(reversed));
  const uncut = (text) => text.slice(0, text.length - ending);
  // Back to the beginning of the word: half of one says less.
  let begin = shared(heads);
  while (begin > 0 && !/\s/.test(heads[0][begin - 1])) begin -= 1;
  const isInHead = heads.length > 1 || tails.length < 2;
  for (const row of rows) row.question = !isInHead ? uncut(row.prompt_end) : row.prompt === row.prompt_end ? uncut(row.prompt).slice(begin) : row.prompt.slice(begin);
}

function rowOf(run, row, step, marks = {}) {
  const href = link(["run", run, marks.of ?? "step", step, row.key]), text = verdict(row);
  return h("tr", { "data-href": href, onclick: (event) => { if (!event.target.closest("a")) location.hash = href; } },
    h("th", { scope: "row", class: "c-id" }, h("a", { href }, marks.step ? `${step}.${row.key}` : row.key)), h("td", { class: `c-verdict ${tone(text)}`, title: row.failure ?? "" }, text), h("td", { class: "number" }, short(row.reward)),
    h("td", { class: "number hide-small" }, row.num_sampled_tokens), h("td", { class: "hide-small" }, row.status ?? "–"), h("td", { class: "number hide-small" }, row.staleness ?? "–"), marks.isGrouped ? null : h("td", { class: "hide-small" }, oneLine(row.question ?? row.prompt)), h("td", marks.isGrouped ? { colspan: "2" } : {}, oneLine(row.reply)));
}

const heads = (first, isGrouped = false) => h("thead", {}, h("tr", {}, [[first, "c-id"], ["verdict", "c-verdict"], ["reward", "c-num number"], ["tokens", "c-num number hide-small"], ["fate", "c-status hide-small"], ["age", "c-num number hide-small"], ...(isGrouped ? [["reply", "", 2]] : [["prompt", "hide-small"], ["reply", ""]])].map(([text, kind, span]) => h("th", { scope: "col", class: kind, colspan: span }, text))));

// The rollouts of a report: of each step the best, a middle and the worst reply to one prompt.
export const written = async (run, steps) => Promise.all(steps.map(async (step) => {
  const { rows } = await ask("rollouts", { run, step, of: "step" });
  tellApart(rows);
  return [h("h3", {}, `What the model wrote after ${step} ${step === 1 ? "step" : "steps"}`),
    scroll(`Rollouts of step ${step}`, h("table", { class: "rows" }, heads("#"), h("tbody", {}, rows.map((row) => rowOf(run, row, step)))))];
}));

export async function stepView(room, { run, of, step, query }) {
  const [{ rows }, told] = await Promise.all([ask("rollouts", { run, step, of }), ask("steps", { run, of })]);
  tellApart(rows);
  const steps = told.steps, at = steps.indexOf(step);
  const go = (by) => { const next = steps[at + by]; if (next !== undefined) location.hash = link(["run", run, of, next], query); };
  let state = { sort: "group", outcome: "", text: "", ...query }, found = null;
  const head = h("thead"), body = h("tbody"), count = h("span", { class: "soft small", role: "status" });
  const search = h("input", { type: "search", value: state.text, placeholder: "a text in prompts and replies", "data-key": "/", "aria-label": "search in this step" });

  async function change(more) {
    state = { ...state, ...more };
    history.replaceState(history.state, "", link(["run", run, of, step], { ...state, sort: state.sort === "group" ? "" : state.sort }));
    found = state.text ? new Set((await ask("search", { run, of, text: state.text, first: step, last: step })).found.map((row) => row.key)) : null;
    draw();
  }
  function draw() {
    const shown = rows.filter((row) => (OUTCOMES[state.outcome] ?? OUTCOMES[""])[1](row) && (!found || found.has(row.key)) && (!state.example || row.example_id === state.example));
    const order = (ORDERS[state.sort] ?? ORDERS.group)[1];
    head.replaceChildren(...heads("#", !order).children);
    if (order) body.replaceChildren(...[...shown].sort(order).map((row) => rowOf(run, row, step, { of })));
    else {
      const groups = new Map();
      for (const row of shown) { if (!groups.has(row.example_id)) groups.set(row.example_id, []); groups.get(row.example_id).push(row); }
      body.replaceChildren(...[...groups].flatMap(([, members]) => {
        const rewards = members.map((row) => row.reward).filter(isNumber), mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : NaN;
        return [h("tr", { class: "group" }, h("th", { colspan: "8", scope: "rowgroup" }, `${members.length} × `, h("b", {}, `mean reward ${short(mean)}`), " · ", oneLine(members[0].question))), ...members.map((row) => rowOf(run, row, step, { of, isGrouped: true }))];
      }));
    }
    count.textContent = `${shown.length} of ${rows.length} rollouts`;
  }
  const solved = rows.filter((row) => row.is_correct === true).length, judged = rows.filter((row) => row.is_correct !== null).length;
  room.append(h("h1", {}, of === "eval" ? `Held-out replies after step ${step}` : `Step ${step}`), h("p", { class: "soft" }, `${rows.length} rollouts of ${new Set(rows.map((row) => row.example_id)).size} prompts${judged ? `, ${percent(solved / judged)} of ${judged} judged ones solved` : ""}`),
    h("div", { class: "filters" }, h("button", { type: "button", disabled: at <= 0, "data-key": "[", onclick: () => go(-1) }, "← earlier step"), h("button", { type: "button", disabled: at < 0 || at >= steps.length - 1, "data-key": "]", onclick: () => go(1) }, "later step →"),
      kept ? null : h("form", { onsubmit: (event) => { event.preventDefault(); change({ text: search.value }); } }, search), choice("outcome", "show", OUTCOMES, state.outcome, (outcome) => change({ outcome })), choice("sort", "order", ORDERS, state.sort, (sort) => change({ sort })), count,
      state.example ? h("button", { type: "button", onclick: () => { location.hash = link(["run", run, of, step]); } }, "all prompts") : null, hidden("j", () => moveRow(1)), hidden("k", () => moveRow(-1))),
    scroll("Rollouts of the step", h("table", { class: "rows" }, head, body)));
  await change({});
  say(`step ${step}`);
}

export async function searchView(room, { run, query }) {
  const text = query.text ?? "", body = h("tbody"), count = h("p", { class: "soft", role: "status" }, "searching…");
  const search = h("input", { type: "search", value: text, "data-key": "/", "aria-label": "search in rollouts" });
  room.append(h("h1", {}, "Search"), h("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); location.hash = link(["run", run, "search"], { text: search.value }); } }, search, h("button", {}, "search"), hidden("j", () => moveRow(1)), hidden("k", () => moveRow(-1))), count,
    scroll("Found rollouts", h("table", { class: "rows" }, heads("step.#"), body)));
  let isGone = false;
  (async () => {
    let last = Number.MAX_SAFE_INTEGER, found = 0;
    while (last !== null && !isGone && found < 1000 && text) {
      const part = await ask("search", { run, text, last });
      found += part.found.length;
      body.append(...part.found.map((row) => rowOf(run, row, row.step, { step: true })));
      last = part.next;
      count.textContent = `${found} found${last === null ? "" : `, searching on from step ${last}…`}`;
    }
    if (!text) count.textContent = "What shall be searched for?";
    else if (found >= 1000) count.textContent = `${found} found, and no more are shown: search for something rarer.`;
  })().catch((error) => { count.textContent = error.message; });
  return () => { isGone = true; };
}

// Colours of tokens, so strong that their text can still be read. A number that is absent has none: it must not look like an ordinary one.
const mix = (name, share) => `color-mix(in srgb, var(--${name}) ${100 * share}%, transparent)`;
const SHADES = {
  logprob: { label: "log-probability", of: (token) => token.logprob, paint: (value) => (isNumber(value) ? mix("hot", Math.min(0.65, -value / 8)) : "") },
  advantage: { label: "advantage", of: (token) => token.advantage, paint: (value) => (isNumber(value) && value ? mix(value > 0 ? "gain" : "loss", Math.min(0.5, 0.12 + Math.abs(value) / 4)) : "") },
  none: { label: "no colour", of: () => null, paint: () => "" },
};
let shade = "logprob";

export async function readerView(room, { run, of, step, index: key }) {
  const [rollout, { rows }] = await Promise.all([ask("rollout", { run, step, key, of }), ask("rollouts", { run, step, of })]);
  const members = rows.filter((row) => row.example_id === rollout.example_id), readout = h("div", { class: "readout", role: "status" }, "Arrow keys, or a pointer on a token, show its numbers.");
  const go = (by) => { const next = rows[rows.findIndex((row) => row.key === key) + by]; if (next) location.hash = link(["run", run, of, step, next.key]); };
  const row = rows.find((one) => one.key === key), text = row ? verdict(row) : "";
  const facts = [["verdict", text], ["reward", short(rollout.reward)], ...Object.entries(rollout.parts).filter(() => Object.keys(rollout.parts).length > 1).map(([name, value]) => [`reward: ${name}`, short(value)]),
    ["gold answer", rollout.answer ?? "–"], ["answer read", rollout.extracted ?? "–"], ["fate", rollout.status ?? "not recorded"], ["age", isNumber(rollout.staleness) ? `${rollout.staleness} ${rollout.staleness === 1 ? "step" : "steps"}` : "not recorded"],
    ...(rollout.failure ? [["failure", `${rollout.failure.owner}: ${rollout.failure.kind}`], ["detail", rollout.failure.detail]] : []), ...(rollout.truncated ? [["cut", "at its limit"]] : []), ...(rollout.format_ok === false ? [["form", "not the asked one"]] : []),
    ["sampling", `temperature ${rollout.sampling.temperature}, top_p ${rollout.sampling.top_p}`], ...Object.entries(rollout.seconds).map(([name, value]) => [`seconds: ${name}`, short(value)]), ...(rollout.isolation ? [["isolation", rollout.isolation]] : []),
    ...Object.entries(rollout.metrics).map(([name, value]) => [name, short(value)])];
  const turns = h("div"), draw = () => turns.replaceChildren(...rollout.turns.map((turn, i) => showTurn(turn, i, readout)));
  room.append(h("h1", {}, `Step ${step}, rollout ${key}`), h("p", {}, h("b", { class: tone(text) }, text), `, reward ${short(rollout.reward)}, example `, h("code", {}, visible(rollout.example_id)), `, attempt ${rollout.sample_index}`),
    h("div", { class: "filters" }, h("button", { type: "button", "data-key": "k", onclick: () => go(-1) }, "← previous"), h("button", { type: "button", "data-key": "j", onclick: () => go(1) }, "next →"),
      choice("shade", "colour tokens by", Object.fromEntries(Object.entries(SHADES).map(([key, one]) => [key, [one.label]])), shade, (value) => { shade = value; draw(); })),
    h("h2", {}, `Its group: ${members.length} attempts at one prompt`), h("div", { class: "siblings" }, members.map((one) => h("a", { href: link(["run", run, of, step, one.key]), "aria-current": one.key === key ? "true" : null }, `${one.key}: ${short(one.reward)} ${verdict(one) === "solved" ? "✓" : verdict(one) === "not solved" ? "✗" : ""}`))),
    members.length > 1 ? h("details", {}, h("summary", {}, "side by side"), table(["#", "reward", "tokens", "reply"], members.map((one) => [one.key, short(one.reward), one.num_sampled_tokens, one.reply]), { label: "The group side by side" })) : "",
    h("h2", {}, "Conversation"), turns, readout, h("h2", {}, "Facts"), table(["fact", "value"], facts, { label: "Facts of the rollout" }), h("details", {}, h("summary", {}, "Fields of the example"), prose(JSON.stringify(rollout.fields, null, 1))));
  draw();
  say(`step ${step}, rollout ${key} of ${rows.length}`);
}

const FOLDED_CHARACTERS = 1500;

function showTurn(turn, number, readout) {
  const isSampled = turn.token_ids !== undefined, isTool = turn.role === "tool";
  const facts = [`${turn.num_tokens} tokens`, isSampled && turn.version !== null ? `weights ${turn.version}` : null, turn.finish ? `ended: ${turn.finish}` : null, isSampled && turn.advantages === null ? "advantages not recorded" : null, isSampled && turn.tokens === null ? "the run's tokenizer is not here: text only" : null];
  const head = h("div", { class: "head" }, h("b", {}, isSampled ? `${turn.role} (the policy)` : turn.role === "prompt" && number > 0 ? "environment" : turn.role), facts.filter(Boolean).map((fact) => h("span", {}, fact)));
  const calls = (turn.calls ?? []).map((call) => h("div", { class: "call" }, "calls ", h("b", {}, visible(call.name)), " ", h("code", {}, visible(call.arguments))));
  let content;
  if (isSampled && turn.tokens) content = showTokens(turn, number, readout);
  else if (turn.text.length > FOLDED_CHARACTERS) content = h("details", { open: !isTool && number === 0 && turn.text.length < 8000 }, h("summary", {}, `${turn.text.length.toLocaleString("en")} characters: ${oneLine(turn.text.slice(0, 80))}…`), prose(turn.text));
  else content = prose(turn.text);
  return h("article", { class: `turn${isSampled ? " sampled" : ""}${isTool ? " tool" : ""}`, "aria-label": `turn ${number + 1}, ${turn.role}` }, head, calls, content);
}

function showTokens(turn, number, readout) {
  const tokens = turn.tokens.map((text, i) => ({ text, id: turn.token_ids[i], logprob: turn.logprobs?.[i] ?? null, advantage: turn.advantages?.[i] ?? null }));
  const paint = SHADES[shade], spans = tokens.map((token) => {
    const span = h("span", {}, token.text === "" ? "" : visible(token.text));
    span.style.background = paint.paint(paint.of(token));
    return span;
  });
  let at = -1;
  const block = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": `tokens of turn ${number + 1}` }, spans);
  const place = new Map(spans.map((span, i) => [span, i]));
  function show(i) {
    spans[at]?.classList.remove("at");
    at = i;
    const token = tokens[at];
    if (!token) return;
    spans[at].classList.add("at");
    const told = `token ${at + 1} of ${tokens.length}: ${JSON.stringify(visible(token.text))}, id ${token.id}, log-probability ${isNumber(token.logprob) ? `${token.logprob.toFixed(3)} (${percent(Math.exp(token.logprob))})` : "absent"}, advantage ${isNumber(token.advantage) ? token.advantage.toFixed(3) : "absent"}`;
    // The status line says it to readers: a value of the block itself would hide its text from them.
    readout.textContent = told;
  }
  block.addEventListener("pointerover", (event) => { const found = place.get(event.target); if (found !== undefined) show(found); });
  block.addEventListener("focus", () => show(Math.max(at, 0)));
  block.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 10, ArrowUp: at - 10, Home: 0, End: tokens.length - 1 };
    if (event.key in moves) { event.preventDefault(); show(Math.min(Math.max(moves[event.key], 0), tokens.length - 1)); spans[at]?.scrollIntoView({ block: "nearest" }); }
  });
  return block;
}
