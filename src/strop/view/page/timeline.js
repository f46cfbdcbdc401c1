// What learner, engines, verifiers and environments did when: a lane for each.
import { ask, duration, h } from "./dom.js";
import { Lanes } from "./lanes.js";

const SHOWN_STEPS = 4;

export function timeline(place, { run, metrics, open }) {
  let isGone = false, asked = -1;
  const lanes = new Lanes({ open }), note = h("p", { class: "soft small" }), range = h("input", { type: "range", min: "1", max: "1", value: "1", "aria-label": "last step of the timeline" });
  const box = h("div", { class: "timeline", hidden: true }, h("h3", {}, "Timeline"), h("label", { class: "soft small" }, "up to step ", range), note, lanes.element);
  place.append(box);
  async function load() {
    const last = metrics.steps.at(-1) ?? 0, isLatest = range.value === range.max;
    range.max = Math.max(last, 1);
    if (isLatest) range.value = range.max;
    const step = Number(range.value);
    if (asked === step && !isLatest) return;
    asked = step;
    const lines = await ask("timeline", { run, first: Math.max(0, step - SHOWN_STEPS + 1), last: step });
    if (isGone) return;
    box.hidden = !lines.length;
    const spans = lines.flatMap((line) => line.spans.map((span) => ({ ...span, step: line.step })));
    lanes.show(spans);
    if (spans.length) {
      const begin = Math.min(...spans.map((span) => span.start)), end = Math.max(...spans.map((span) => span.end));
      note.textContent = `Steps ${lines[0].step} to ${lines.at(-1).step}: ${duration(end - begin)}. Arrow keys move over the spans of a lane.`;
    }
  }
  range.addEventListener("input", () => load());
  const timer = setInterval(() => { if (range.value === range.max && (metrics.steps.at(-1) ?? 0) !== asked) load().catch(() => {}); }, 1000);
  load().catch(() => {});
  return () => { isGone = true; clearInterval(timer); };
}
