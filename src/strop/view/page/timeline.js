// What learner, engines, verifiers and environments did when: a lane for each, on one canvas. A lane's spans that
// overlap lie in rows below each other.
import { clear, colour } from "./charts.js";
import { ask, duration, h, table, unfold } from "./dom.js";

const HUES = ["stage-0", "stage-1", "stage-2", "stage-3", "stage-4", "run-3"], ROW = 9, MOST_ROWS = 12, GAP = 10, LEFT = 96, SHOWN_STEPS = 4;

class Lanes {
  constructor({ open }) {
    this.open = open; this.spans = []; this.at = -1;
    this.canvas = h("canvas", { tabindex: "0", role: "slider", "aria-label": "spans of the timeline", "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0",
      onpointermove: (event) => this.point(event), onclick: () => this.openAt(), onkeydown: (event) => this.key(event) });
    this.read = h("div", { class: "read" });
    this.legend = h("ul", { class: "legend" });
    const [button, place] = unfold("table", () => this.asTable());
    this.element = h("figure", {}, h("figcaption", {}, this.legend, button), this.canvas, this.read, place);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(spans) {
    const lanes = [...new Set(spans.map((span) => span.lane))].sort((a, b) => order(a) - order(b) || a.localeCompare(b, "en", { numeric: true }));
    this.names = [...new Set(spans.map((span) => span.name))];
    this.spans = []; this.lanes = [];
    let y = 4;
    for (const lane of lanes) {
      const ends = [], mine = spans.filter((span) => span.lane === lane).sort((a, b) => a.start - b.start);
      for (const span of mine) {
        let row = ends.findIndex((end) => end <= span.start + 1e-6);
        if (row < 0) row = ends.length < MOST_ROWS ? ends.length : ends.indexOf(Math.min(...ends));
        ends[row] = Math.max(span.end, ends[row] ?? 0);
        this.spans.push({ ...span, y: y + row * ROW });
      }
      this.lanes.push({ lane, y, height: ends.length * ROW });
      y += ends.length * ROW + GAP;
    }
    this.canvas.style.height = `${y + 8}px`;
    this.begin = Math.min(...spans.map((span) => span.start)); this.end = Math.max(...spans.map((span) => span.end));
    this.at = -1;
    this.legend.replaceChildren(...this.names.map((name) => h("li", {}, h("i", { style: { background: `var(--${this.hue(name)})` } }), name)));
    this.draw();
  }

  hue(name) { return HUES[this.names.indexOf(name) % HUES.length]; }

  draw() {
    const sheet = this.spans.length ? clear(this.canvas) : null;
    if (!sheet) return;
    const { pen, width } = sheet;
    pen.textBaseline = "top"; pen.fillStyle = colour("soft");
    this.X = (at) => LEFT + ((at - this.begin) / Math.max(this.end - this.begin, 1e-9)) * (width - LEFT - 6);
    for (const { lane, y } of this.lanes) pen.fillText(lane, 2, y - 1, LEFT - 8);
    this.spans.forEach((span, i) => {
      const x = this.X(span.start), w = Math.max(this.X(span.end) - x, 1);
      pen.fillStyle = colour(this.hue(span.name)); pen.fillRect(x, span.y, w - (w > 3 ? 1 : 0), ROW - 1);
      if (i === this.at) { pen.strokeStyle = colour("ink"); pen.lineWidth = 2; pen.strokeRect(x - 1, span.y - 1, w + 2, ROW + 1); }
    });
    this.say();
  }

  say() {
    const span = this.spans[this.at], text = span ? describe(span) : `${this.spans.length} spans on ${this.lanes.length} lanes`;
    this.read.textContent = text;
    for (const [name, value] of [["aria-valuemax", this.spans.length - 1], ["aria-valuenow", Math.max(this.at, 0)], ["aria-valuetext", text]]) this.canvas.setAttribute(name, value);
  }

  point(event) {
    if (!this.X) return;
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const found = this.spans.findIndex((span) => y >= span.y && y < span.y + ROW && x >= this.X(span.start) - 1 && x <= this.X(span.end) + 1);
    if (found !== this.at) { this.at = found; this.draw(); }
  }

  key(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move && this.spans.length) { event.preventDefault(); this.at = Math.min(Math.max(this.at + move, 0), this.spans.length - 1); this.draw(); }
    else if (event.key === "Enter") this.openAt();
  }

  openAt() { if (this.at >= 0) this.open(this.spans[this.at].step); }

  asTable() {
    const rows = this.spans.slice(0, 500).map((span) => [span.lane, span.name, span.step, (span.end - span.start).toFixed(3), detail(span)]);
    return table(["lane", "what", "step", "seconds", "detail"], rows, { label: "Timeline as a table" });
  }
}

const order = (lane) => ["learner", "engine", "verifier", "environments"].findIndex((name) => lane.startsWith(name));
const detail = (span) => Object.entries(span.detail ?? {}).map(([name, value]) => `${name} ${value}`).join(", ");
const describe = (span) => `${span.lane}: ${span.name}, step ${span.step}, ${duration(span.end - span.start)}${span.detail ? `, ${detail(span)}` : ""}`;

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
