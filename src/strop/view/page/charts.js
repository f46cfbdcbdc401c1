// Curves over steps on a canvas, drawn when they come into sight. Each is a slider for the keyboard and for
// readers: it says the values of its step, and Enter or a click opens that step.
import { h, isNumber, percent, short, table, unfold } from "./dom.js";

const MOST_POINTS = 600, TICKS = 5;

// A canvas takes no variables: what one stands for in this theme is asked of an element.
const probe = document.body.appendChild(h("i", { hidden: true }));
export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

// A pen for an empty canvas, in the units in which it is shown, with its width and height; null while it has none.
export function clear(canvas) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width || !height) return null;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  return { pen, width, height };
}

function ticks(low, high) {
  if (high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high), 1e-200)) {
    const margin = Math.abs(low) * 0.5 || 1;
    low -= margin; high += margin;
  }
  const rough = (high - low) / (TICKS - 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough * (1 - 1e-9));
  const found = [];
  for (let k = Math.floor(low / step + 1e-9); k <= Math.ceil(high / step - 1e-9); k += 1) found.push(k * step);
  return found;
}

// Means of buckets, so that a long run costs no more than a short one; a bucket without numbers is a gap.
function thin(x, y) {
  const size = Math.max(1, Math.ceil(x.length / MOST_POINTS));
  if (size === 1) return x.map((at, i) => [at, y[i]]);
  const found = [];
  for (let start = 0; start < x.length; start += size) {
    const end = Math.min(start + size, x.length);
    let sum = 0, count = 0;
    for (let i = start; i < end; i += 1) if (isNumber(y[i])) { sum += y[i]; count += 1; }
    found.push([(x[start] + x[end - 1]) / 2, count ? sum / count : NaN]);
  }
  return found;
}

export function smooth(y, window = 5) {
  return y.map((value, i) => {
    if (!isNumber(value)) return NaN;
    let sum = 0, count = 0;
    for (let k = Math.max(0, i - window + 1); k <= i; k += 1) if (isNumber(y[k])) { sum += y[k]; count += 1; }
    return sum / count;
  });
}

const sights = new IntersectionObserver((entries) => {
  for (const entry of entries) { entry.target.chart.isSeen = entry.isIntersecting; if (entry.isIntersecting) entry.target.chart.draw(); }
}, { rootMargin: "200px" });
const sizes = new ResizeObserver((entries) => entries.forEach((entry) => entry.target.chart.later()));
const all = new Set();
// On paper all are in sight.
window.addEventListener("beforeprint", () => all.forEach((chart) => chart.draw()));
export const redrawAll = () => all.forEach((chart) => chart.later());
export const forgetCharts = () => { for (const chart of all) { sights.unobserve(chart.canvas); sizes.unobserve(chart.canvas); } all.clear(); };

// `series`: () => [{label, colour, x, y, isFaint, dash, isArea}]; `points`: () => [{x, y, low, high, label}].
export class Chart {
  constructor({ title, series, points = () => [], isShare = false, unit = "", open = null }) {
    Object.assign(this, { title, series, points, isShare, unit, open, at: null, isSeen: false, isWaiting: false });
    this.canvas = h("canvas", {
      tabindex: "0", role: "slider", "aria-label": title, "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0",
      onpointermove: (event) => this.point(event), onpointerleave: () => this.moveTo(null),
      onclick: (event) => { this.point(event); this.openAt(); },
      onkeydown: (event) => this.key(event), onblur: () => this.moveTo(null),
    });
    this.canvas.chart = this;
    this.read = h("div", { class: "read" });
    this.legend = h("ul", { class: "legend" });
    const [button, place] = unfold("table", () => this.asTable());
    this.figure = h("figure", {}, h("figcaption", {}, h("h3", {}, title), button), this.legend, this.canvas, this.read, place);
    sights.observe(this.canvas); sizes.observe(this.canvas); all.add(this);
  }

  label(value) { return this.isShare ? percent(value) : `${short(value)}${this.unit}`; }

  later() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => { this.isWaiting = false; if (this.isSeen) this.draw(); });
  }

  lay() {
    this.drawn = this.series().filter((one) => one.y.some(isNumber));
    this.marks = this.points();
    const values = this.marks.flatMap((mark) => [mark.low, mark.high].filter(isNumber));
    let total = [];
    for (const one of this.drawn) {
      if (one.isArea) total = one.y.map((value, i) => (isNumber(value) ? value : 0) + (total[i] ?? 0));
      one.top = one.isArea ? total : one.y;
      for (const value of one.top) if (isNumber(value)) values.push(value);
    }
    const low = values.reduce((a, b) => Math.min(a, b), 0), high = values.reduce((a, b) => Math.max(a, b), 0);
    this.grid = this.isShare ? [0, 0.25, 0.5, 0.75, 1] : ticks(low, high);
    const ends = [...this.drawn.map((one) => one.x.at(-1) ?? 0), ...this.marks.map((mark) => mark.x)];
    this.last = Math.max(1, ...ends);
  }

  draw() {
    this.lay();
    const sheet = clear(this.canvas);
    if (!sheet) return;
    const { pen, width, height } = sheet;
    const names = this.grid.map((value) => (this.isShare ? percent(value, 0) : short(value)));
    const left = Math.max(...names.map((name) => pen.measureText(name).width)) + 8, right = width - 8, top = 8, bottom = height - 20;
    const [floor, ceiling] = [this.grid[0], this.grid.at(-1)];
    const X = (step) => left + (step / this.last) * (right - left), Y = (value) => bottom - ((value - floor) / (ceiling - floor)) * (bottom - top);
    Object.assign(this, { left, right, X, Y });
    pen.strokeStyle = colour("rule"); pen.fillStyle = colour("soft"); pen.lineWidth = 1; pen.textBaseline = "middle"; pen.textAlign = "right";
    this.grid.forEach((value, i) => { const y = Math.round(Y(value)) + 0.5; pen.beginPath(); pen.moveTo(left, y); pen.lineTo(right, y); pen.stroke(); pen.fillText(names[i], left - 5, y); });
    pen.textBaseline = "alphabetic"; pen.textAlign = "center";
    for (const step of ticks(0, this.last)) if (step <= this.last && Number.isInteger(step)) pen.fillText(step.toLocaleString("en"), Math.min(Math.max(X(step), left), right - 6), height - 5);
    this.drawSeries(pen, X, Y);
    this.drawMarks(pen, X, Y);
    if (this.at !== null) { pen.strokeStyle = colour("ink"); pen.lineWidth = 1; pen.beginPath(); pen.moveTo(X(this.at), top); pen.lineTo(X(this.at), bottom); pen.stroke(); }
    this.say();
  }

  drawSeries(pen, X, Y) {
    let below = null;
    for (const one of this.drawn) {
      const points = thin(one.x, one.top);
      pen.strokeStyle = pen.fillStyle = colour(one.colour); pen.lineWidth = one.isFaint ? 1 : 2; pen.setLineDash(one.dash ?? []); pen.lineJoin = "round";
      if (one.isArea) {
        pen.beginPath();
        points.forEach(([x, y], i) => (i ? pen.lineTo(X(x), Y(y)) : pen.moveTo(X(x), Y(y))));
        const floor = below ?? points.map(([x]) => [x, 0]);
        [...floor].reverse().forEach(([x, y]) => pen.lineTo(X(x), Y(y)));
        pen.globalAlpha = 0.85; pen.fill(); pen.globalAlpha = 1; below = points;
        continue;
      }
      let isOpen = false, previous = null;
      pen.beginPath();
      points.forEach(([x, y], i) => {
        if (!isNumber(y)) { isOpen = false; return; }
        if (isOpen) pen.lineTo(X(x), Y(y)); else pen.moveTo(X(x), Y(y));
        // A number without neighbours has no line: it is a dot.
        if (!isOpen && !isNumber(points[i + 1]?.[1])) { previous = [x, y]; pen.stroke(); pen.beginPath(); pen.arc(X(x), Y(y), 2.5, 0, 7); pen.fill(); pen.beginPath(); }
        isOpen = true;
      });
      pen.stroke(); pen.setLineDash([]);
    }
  }

  drawMarks(pen, X, Y) {
    for (const mark of this.marks) {
      if (!isNumber(mark.y)) continue;
      pen.strokeStyle = colour(mark.colour ?? "second"); pen.fillStyle = colour("card"); pen.lineWidth = 2;
      if (isNumber(mark.low)) { pen.beginPath(); pen.moveTo(X(mark.x), Y(mark.low)); pen.lineTo(X(mark.x), Y(mark.high)); pen.stroke(); }
      pen.beginPath(); pen.arc(X(mark.x), Y(mark.y), 4, 0, 7); pen.fill(); pen.stroke();
    }
  }

  describe(step) {
    const parts = [];
    for (const one of this.drawn) { const i = nearest(one.x, step); if (i >= 0 && isNumber(one.y[i])) parts.push(`${one.label} ${this.label(one.y[i])}`); }
    for (const mark of this.marks) if (mark.x === step) parts.push(mark.label);
    return parts.length ? `step ${step}: ${parts.join(", ")}` : `step ${step}`;
  }

  say() {
    const step = this.at ?? this.drawn[0]?.x.at(-1) ?? this.marks.at(-1)?.x ?? 0;
    const text = this.describe(step);
    this.read.textContent = this.at === null && !this.drawn.length && !this.marks.length ? "nothing is recorded yet" : text;
    const { canvas } = this;
    canvas.setAttribute("aria-valuenow", step); canvas.setAttribute("aria-valuemax", this.last); canvas.setAttribute("aria-valuetext", text);
    const shown = this.drawn.map((one) => `${one.label} ${one.colour}`).join() + this.marks.length;
    if (this.shown !== shown) {
      this.shown = shown;
      this.legend.replaceChildren(...this.drawn.map((one) => h("li", {}, h("i", { style: { background: `var(--${one.colour})` } }), one.label)),
        ...(this.marks.length && this.marks[0].name ? [h("li", {}, h("i", { style: { background: "var(--second)" } }), this.marks[0].name)] : []));
    }
  }

  point(event) {
    // A pointer may be here before the chart was seen to be in sight.
    if (this.left === undefined) this.draw();
    if (this.left === undefined) return;
    const box = this.canvas.getBoundingClientRect();
    // A mark is met where the pointer is on it: a step of the curve may be at the same place.
    this.mark = this.marks.find((mark) => isNumber(mark.y) && Math.hypot(this.X(mark.x) - event.clientX + box.left, this.Y(mark.y) - event.clientY + box.top) < 9) ?? null;
    this.moveTo(((event.clientX - box.left - this.left) / (this.right - this.left)) * this.last);
  }

  steps() { return [...new Set([...(this.drawn ?? []).flatMap((one) => one.x), ...(this.marks ?? []).map((mark) => mark.x)])].sort((a, b) => a - b); }

  moveTo(step) {
    const steps = step === null ? [] : this.steps();
    const found = steps.length ? steps[nearest(steps, step)] : null;
    if (found !== this.at) { this.at = found; this.draw(); }
  }

  key(event) {
    const steps = this.steps(), here = this.at === null ? steps.length - 1 : steps.indexOf(this.at);
    const moves = { ArrowLeft: here - (this.at === null ? 0 : 1), ArrowRight: here + 1, Home: 0, End: steps.length - 1, PageUp: here - 10, PageDown: here + 10 };
    if (event.key in moves && steps.length) { event.preventDefault(); this.mark = null; this.moveTo(steps[Math.min(Math.max(moves[event.key], 0), steps.length - 1)]); }
    else if (event.key === "Enter") this.openAt();
  }

  openAt() { if (this.open && this.at !== null) this.open(this.at, this.mark); }

  asTable() {
    this.lay();
    const steps = this.steps(), every = Math.max(1, Math.ceil(steps.length / 50));
    const shown = steps.filter((_, i) => i % every === 0 || i === steps.length - 1);
    const rows = shown.map((step) => [step, ...this.drawn.map((one) => { const i = one.x.indexOf(step); return i < 0 ? "–" : this.label(one.y[i]); }),
      ...(this.marks.length ? [this.marks.find((mark) => mark.x === step)?.label ?? "–"] : [])]);
    return table(["step", ...this.drawn.map((one) => one.label), ...(this.marks.length ? ["held out"] : [])], rows, { label: `${this.title} as a table` });
  }
}

export function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  if (high < 0) return -1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] > value) high = middle; else low = middle; }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}
