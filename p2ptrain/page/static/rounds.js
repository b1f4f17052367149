// The last rounds as bars: a row a device, the predicted round behind what was measured.
import { svg } from "/static/chart.js";

const KINDS = ["forward", "backward", "update", "sum", "send", "receive", "wait"];
const ROW = 64, TOP = 20, NAME = 18, COMPUTING = 3;
// Where a kind stands in its row, and how tall it is.
const LANES = { sum: [19, 5], send: [26, 5], receive: [32, 5], wait: [38, 3] };

const milliseconds = (seconds) => seconds >= 10 ? `${seconds.toFixed(0)} s` : seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(seconds * 1000).toFixed(seconds < 0.01 ? 2 : 0)} ms`;

// Seconds in which at least one bar of these kinds stands.
function covered(bars, device, kinds) {
  let sum = 0, until = -1;
  for (const [, , start, end] of bars.filter((b) => b[0] === device && kinds.includes(KINDS[b[1]])).sort((a, b) => a[2] - b[2])) {
    if (end > until) { sum += end - Math.max(start, until); until = end; }
  }
  return sum;
}

export function summary(picture) {
  const share = (seconds) => `${Math.round(100 * seconds / picture.seconds)}%`;
  return picture.devices.map((name, device) => {
    const does = [["computes", KINDS.slice(0, COMPUTING)], ["sums", ["sum"]], ["sends", ["send"]], ["receives", ["receive"]], ["waits", ["wait"]]];
    const parts = does.map(([verb, kinds]) => [verb, covered(picture.bars, device, kinds)]).filter(([, seconds]) => seconds / picture.seconds >= 0.005);
    return `${name} ${parts.map(([verb, seconds]) => `${verb} ${share(seconds)}`).join(", ")}`;
  });
}

export function drawRounds(node, picture, colors) {
  const width = Math.max(node.clientWidth, 280), height = TOP + ROW * picture.devices.length + 6;
  const predicted = picture.predicted;
  const span = Math.max(picture.seconds, predicted ? picture.starts.at(-1) + predicted.seconds : 0);
  const x = (seconds) => 1 + (seconds / span) * (width - 2);
  const bar = (kind, device, start, end, ghost) => {
    const [at, tall] = LANES[kind] ?? [2, 16], y = TOP + ROW * device + NAME + at;
    const box = { x: x(start).toFixed(1), width: Math.max(x(end) - x(start), 0.8).toFixed(1) };
    return svg("rect", { class: `bar-${kind}${ghost ? " ghost" : ""}`, ...box, y: ghost ? y - 3 : y, height: ghost ? tall + 6 : tall });
  };
  const parts = [];
  picture.starts.forEach((start, i) => {
    parts.push(svg("line", { class: "grid", x1: x(start), x2: x(start), y1: TOP - 6, y2: height }),
      svg("text", { x: x(start) + 3, y: TOP - 9 }, `round ${picture.rounds[i].toLocaleString("en")}`));
  });
  picture.devices.forEach((name, device) => {
    const dot = svg("circle", { cx: 6, cy: TOP + ROW * device + 7, r: 5 });
    dot.style.fill = `var(--c${colors.get(name) ?? 0})`;
    parts.push(dot, svg("text", { x: 17, y: TOP + ROW * device + 12, class: "name" }, name));
  });
  for (const [i, start] of (predicted ? picture.starts : []).entries()) {
    const next = picture.starts[i + 1] ?? Infinity;  // no ghost stands before another
    for (const [device, kind, from, to] of predicted.bars) {
      if (kind < COMPUTING && start + from < next) parts.push(bar(KINDS[kind], device, start + from, Math.min(start + to, next), true));
    }
  }
  for (const [device, kind, start, end] of picture.bars) parts.push(bar(KINDS[kind], device, start, end, false));
  const text = `${picture.rounds.length} rounds in ${milliseconds(picture.seconds)}: ${summary(picture).join("; ")}`;
  node.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": text }, ...parts));
}

export function caption(picture) {
  if (!picture.rounds.length) return "Devices have begun to record. A whole round is shown as soon as it was watched.";
  const each = milliseconds(picture.seconds / picture.rounds.length);
  const said = picture.predicted ? ` The pale bars behind are the round that the plan predicted, ${milliseconds(picture.predicted.seconds)} each.` : "";
  return `A round takes about ${each}.${said}`;
}
