// A curve as SVG: no library, some 1,000 points at most.
const NS = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Round borders for a scale of about `count` steps.
export function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

// The middle course of what jumps from step to step: each point with its neighbours.
export function smoothed(values, reach) {
  if (reach < 1) return values;
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - reach), i + reach + 1).filter((v) => v !== null).sort((a, b) => a - b);
    return near.length ? near[near.length >> 1] : null;
  });
}

const WIDTH = 560, HEIGHT = 190, LEFT = 52, RIGHT = 10, TOP = 12, BOTTOM = 24;

export class Chart {
  // format: number -> text. fromZero: the scale begins at 0.
  constructor(title, format, { fromZero = false, median = false } = {}) {
    this.title = title; this.format = format; this.fromZero = fromZero; this.median = median;
    this.value = document.createElement("span");
    this.picture = svg("svg", { role: "img", tabindex: "0", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
    const caption = document.createElement("figcaption");
    caption.append(title, this.value);
    this.node = document.createElement("figure");
    this.node.className = "chart";
    this.more = document.createElement("p");
    this.more.className = "quiet";
    this.node.append(caption, this.picture, this.more);
    this.at = null; this.key = ""; this.points = []; this.earlier = [];
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.look(null));
    this.picture.addEventListener("blur", () => this.look(null));
    this.picture.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => { this.key = ""; this.draw(); }).observe(this.picture);
  }

  // points: [step, value or null]; expected: a value or null; steps: of the whole job, or null;
  // earlier: other runs' points.
  show(points, expected, steps, earlier = []) {
    this.earlier = earlier;
    this.points = points.filter((p) => p[1] !== null);
    this.expected = expected; this.steps = steps;
    this.draw();
  }

  note(text) { this.more.textContent = text; }

  draw() {
    const points = this.points, last = points[points.length - 1];
    const width = Math.max(this.picture.clientWidth, 220);
    const key = [points.length, last, this.expected, this.steps, width, this.earlier.length].join();
    if (key === this.key || !last) return;
    this.key = key;
    this.width = width;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const values = points.map((p) => p[1]);
    const shown = this.median ? smoothed(values, Math.min(6, values.length >> 4)) : values;
    const first = points[0][0], end = Math.max(last[0] * (this.earlier.length ? 1.25 : 1), first + 1);
    const earlier = this.earlier.map((run) => run.filter((p) => p[0] >= first && p[0] <= end)).filter((run) => run.length > 1);
    const scale = this.expected === null || this.expected === undefined ? shown : [...shown, this.expected];
    const sorted = [...scale, ...earlier.flatMap((run) => run.map((p) => p[1]))].sort((a, b) => a - b);
    let low = this.fromZero ? 0 : sorted[0], high = sorted[sorted.length - 1];
    if (high === low) { high += Math.abs(high) * 0.1 || 1; low -= this.fromZero ? 0 : Math.abs(low) * 0.1 || 1; }
    high += (high - low) * 0.05;
    this.x = (step) => LEFT + (step - first) / (end - first) * (width - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - (Math.min(value, high) - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const at of ticks(low, high, 4)) {
      const y = this.y(at);
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        svg("text", { x: LEFT - 7, y: y + 4, "text-anchor": "end" }, this.format(at)));
    }
    for (const at of ticks(first, end, width < 400 ? 3 : 6)) if (Number.isInteger(at)) {
      const x = this.x(at);
      parts.push(svg("text", { x, y: HEIGHT - 6, "text-anchor": x > width - 30 ? "end" : "middle" }, at.toLocaleString("en")));
    }
    for (const run of earlier) parts.push(svg("path", { class: "earlier", d: this.path(run, run.map((p) => p[1])) }));
    if (this.median && shown !== values) parts.push(svg("path", { class: "faint", d: this.path(points, values) }));
    if (this.expected !== null && this.expected !== undefined) {
      const y = this.y(this.expected);
      parts.push(svg("line", { class: "expected", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    }
    parts.push(svg("path", { class: "curve", d: this.path(points, shown) }));
    this.cross = svg("g");
    parts.push(this.cross);
    this.picture.replaceChildren(...parts);
    const begin = points[0];
    this.picture.setAttribute("aria-label", `${this.title} from step ${begin[0]} to ${last[0]}: from ${this.format(begin[1])} to ${this.format(last[1])}` +
      (this.expected ? `, predicted ${this.format(this.expected)}` : "") + (earlier.length ? `, beside ${earlier.length} earlier ${earlier.length === 1 ? "run" : "runs"}` : "") + ". Arrow keys read single steps.");
    this.look(this.at);
  }

  path(points, values) {
    return points.map((p, i) => `${i ? "L" : "M"}${this.x(p[0]).toFixed(1)} ${this.y(values[i]).toFixed(1)}`).join("");
  }

  look(index) {
    const points = this.points;
    this.at = index === null || !points.length ? null : Math.min(Math.max(index, 0), points.length - 1);
    const [step, value] = points[this.at ?? points.length - 1] ?? [0, null];
    this.value.textContent = value === null ? "" : `${this.at === null ? "" : `step ${step.toLocaleString("en")}: `}${this.format(value)}`;
    if (!this.cross) return;
    this.cross.replaceChildren();
    if (this.at === null) return;
    const x = this.x(step), y = this.y(value);
    this.cross.append(svg("line", { class: "mark", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }), svg("circle", { class: "spot", cx: x, cy: y, r: 5 }));
  }

  point(event) {
    if (!this.points.length || !this.x) return;
    const box = this.picture.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * this.width;
    let best = 0;
    this.points.forEach((p, i) => { if (Math.abs(this.x(p[0]) - x) < Math.abs(this.x(this.points[best][0]) - x)) best = i; });
    this.look(best);
  }

  press(event) {
    const count = this.points.length, at = this.at ?? count - 1;
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: count - 1, PageUp: at - 10, PageDown: at + 10 };
    if (event.key === "Escape") return this.look(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.look(moves[event.key]);
  }
}
