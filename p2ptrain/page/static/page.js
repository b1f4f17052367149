// The page: one state from the device, kept by its stream, shown by section.
import { Chart, svg } from "/static/chart.js";
import { caption, drawRounds, summary } from "/static/rounds.js";

const $ = (id) => document.getElementById(id);
const SILENT_MS = 40000, ROUNDS_MS = 3000, AGAIN_MS = 3000, HIDDEN_MS = 5000;

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "color") node.style.setProperty("--c", `var(--c${value})`);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

// -- numbers ------------------------------------------------------------------------------------

const number = (value, digits = 3) => value === null ? "–" : value.toLocaleString("en", { maximumSignificantDigits: digits });
const small = (value) => value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : number(value, 4);
const speed = (value) => value >= 1000 ? Math.round(value).toLocaleString("en") : number(value, 3);

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${number(value)} ${units[at]}`;
}
const rate = (value) => value === null || value === undefined ? "–" : value === 0 ? "idle" : `${bytes(value)}/s`;
const delay = (seconds) => seconds === null ? "–" : `${number(seconds * 1000, 2)} ms`;

function duration(seconds) {
  const whole = Math.max(Math.round(seconds), 0);
  if (whole < 60) return `${whole} s`;
  if (whole >= 600 && whole < 3600) return `${Math.round(whole / 60)} min`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 48 * 3600) return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
  return `${Math.floor(whole / 86400)} days`;
}

// -- the state ----------------------------------------------------------------------------------

let state = null;

const show = {
  household() {
    const house = state.household;
    $("who").textContent = `on ${house.name}`;
    document.title = `p2ptrain on ${house.name}`;
    $("foot").textContent = `p2ptrain ${house.version}. ${house.coordinator ? `${house.coordinator} plans the work.` : "No device plans the work yet."}` +
      (house.may_change ? "" : " This browser may look and change nothing.");
    $("invite").hidden = !house.may_change;
  },

  job() {
    const job = state.job ?? null;
    $("headline").textContent = job ? job.headline : "Nothing is being trained";
    $("job-sentence").replaceChildren(...(job ? [job.sentence] : ["Start a training on the device that has the data: ", el("code", {}, "p2ptrain train SCRIPT")]));
    const runs = job !== null && !ENDED.has(job.state), scripts = runs ? [] : state.household.scripts ?? [];
    $("starts").replaceChildren(...scripts.map((path) => {
      const button = el("button", { type: "button", title: path }, `Start ${path.split(/[\\/]/).at(-1)}`);
      button.addEventListener("click", () => post("/api/start", { script: path }));
      return el("li", {}, button);
    }));
    $("limit").hidden = !job?.limit;
    $("limit").textContent = job?.limit ? `${job.limit.charAt(0).toUpperCase()}${job.limit.slice(1)}.` : "";
    $("energy").hidden = !job?.energy;
    $("energy").textContent = job?.energy ? `Energy: ${job.energy}.` : "";
    const figures = job === null || job.step === 0 ? [] : [
      ["Step", job.step.toLocaleString("en"), job.steps ? `of ${job.steps.toLocaleString("en")}` : null],
      ["Loss", job.loss === null ? "–" : small(job.loss), "in training"],
      ["Samples a second", job.samples_per_s === null ? "–" : speed(job.samples_per_s), job.predicted_samples_per_s ? `predicted ${speed(job.predicted_samples_per_s)}` : null],
      job.tokens_per_s === null ? null : ["Tokens a second", speed(job.tokens_per_s), null],
      job.lr === null ? null : ["Learning rate", small(job.lr), null],
      job.seconds_left === null ? null : ["Time left", duration(job.seconds_left), null],
      ...Object.entries(state.curve?.evals?.at(-1)?.metrics ?? {}).slice(0, 3).map(([name, value]) => [measured(name), small(value), `evaluated after step ${state.curve.evals.at(-1).step.toLocaleString("en")}`]),
    ].filter((f) => f !== null);
    $("figures").replaceChildren(...figures.map(([name, value, more]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, more) : null))));
    const part = job && job.steps ? Math.min(100, 100 * job.step / job.steps) : null;
    $("bar").hidden = part === null;
    if (part !== null) { $("bar-fill").style.width = `${part}%`; $("bar").setAttribute("aria-valuenow", Math.round(part)); }
    $("steer").hidden = !job || job.why_not_steer !== null;
    $("pause").textContent = job?.state === "paused" ? "Resume" : "Pause";
  },

  plan() {
    const plan = state.plan ?? null;
    $("model").hidden = plan === null;
    $("rounds").hidden = plan === null || !["training", "paused", "waiting"].includes(state.job?.state);
    $("ask-advice").parentElement.hidden = state.job?.state !== "training" || !state.household.may_change;
    if (plan === null) return;
    $("plan-sentence").textContent = plan.sentence;
    const colors = new Map(state.devices.map((d) => [d.name, d.color]));
    $("strip").replaceChildren(...plan.stages.map((stage) => {
      const bands = el("div", { class: "bands" }, ...stage.devices.map((device) => {
        const band = el("div", { class: "band", color: colors.get(device.name) ?? 0 }, device.name);
        band.style.flexGrow = device.share;
        return band;
      }));
      const count = stage.end_unit - stage.first_unit;
      const item = el("li", { title: stage.sentence }, bands, el("div", { class: "units" }, `${stage.layers} · ${count} ${count === 1 ? "unit" : "units"}`), el("span", { class: "unseen" }, stage.sentence));
      item.style.flexGrow = Math.max(count, 1);
      return item;
    }));
    $("reasons").replaceChildren(...plan.reasons.map((reason) => el("li", {}, reason)));
  },

  devices() {
    const list = $("devices"), old = new Map([...list.children].map((card) => [card.dataset.id, card]));
    const focused = document.activeElement?.closest?.(".card")?.dataset.id;
    const cards = state.devices.map((device) => {
      const key = JSON.stringify([device, state.household.may_change, state.household.coordinator]);
      const known = old.get(device.id);
      if (known && known.dataset.key === key) return known;
      const made = card(device);
      made.dataset.key = key;
      return made;
    });
    if (cards.length !== list.children.length || cards.some((c, i) => list.children[i] !== c)) list.replaceChildren(...cards);
    if (focused && !document.activeElement?.closest?.(".card")) list.querySelector(`[data-id="${CSS.escape(focused)}"] button`)?.focus();
  },

  links() {
    const links = state.links;
    $("links").hidden = links.length === 0;
    $("link-rows").replaceChildren(...links.map((link) => el("tr", {}, el("td", {}, link.sender), el("td", {}, link.receiver),
      el("td", { class: "number" }, rate(link.bytes_per_s)), el("td", { class: "number" }, delay(link.latency_s)), el("td", { class: "number" }, rate(link.now_bytes_per_s)))));
    drawMap();
  },

  notes() {
    const times = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
    $("notes").replaceChildren(...[...state.notes].reverse().map((note) => {
      const at = new Date(note.at * 1000);
      return el("li", { "data-kind": note.kind }, el("time", { datetime: at.toISOString() }, times.format(at)), el("span", {}, note.text));
    }));
    if (!state.notes.length) $("notes").replaceChildren(el("li", {}, "Nothing yet."));
  },

  curve() {
    const curve = state.curve ?? null, points = curve?.points ?? [];
    $("charts").hidden = points.length < 2;
    if (points.length < 2) return;
    const steps = state.job?.steps ?? null;
    const earlier = curve.earlier ?? [];
    charts.loss.show(points.map((p) => [p[0], p[2]]), null, steps, earlier.map((run) => run.points));
    charts.loss.note(earlier.length ? `Pale: ${earlier.map((run) => `${when(run.ended_at)} (${run.state}, ${small(run.points.at(-1)[1])})`).join(", ")}` : "");
    charts.speed.show(points.map((p) => [p[0], p[3]]), state.job?.predicted_samples_per_s ?? null, steps);
    const rates = points.map((p) => [p[0], p[4]]);
    const changes = rates.some((p) => p[1] !== rates[0][1]);
    const names = [...new Set(curve.evals.flatMap((e) => Object.keys(e.metrics)))].slice(0, 4);
    const more = changes ? [["Learning rate", rates]] : [];  // shown where a schedule changes it
    for (const name of names) {
      const values = curve.evals.filter((e) => name in e.metrics).map((e) => [e.step, e.metrics[name]]);
      if (values.length > 1) more.push([name, values]);
    }
    const wanted = [charts.loss, charts.speed];
    for (const [name, values] of more) {
      charts.more[name] ??= new Chart(name === "Learning rate" ? name : `${measured(name)}, evaluated`, small);
      charts.more[name].show(values, null, steps);
      wanted.push(charts.more[name]);
    }
    const nodes = wanted.map((c) => c.node);
    if (nodes.length !== $("charts").children.length || nodes.some((n, i) => $("charts").children[i] !== n)) $("charts").replaceChildren(...nodes);
  },

  pairing() {
    const pairing = state.pairing ?? null;
    $("pairing").hidden = pairing === null;
    $("invite").disabled = pairing !== null;
    if (pairing === null) return;
    $("pairing-code").textContent = `${pairing.code.slice(0, 4)} ${pairing.code.slice(4)}`;
    $("pairing-command").textContent = pairing.command;
    $("pairing-qr").replaceChildren(qr(pairing.modules));
    countDown();
  },
};

const charts = { loss: new Chart("Loss", small), speed: new Chart("Samples a second", speed, { fromZero: true, median: true }), more: {} };

// Sections that are shown with what another one says.
const ENDED = new Set(["done", "failed", "stopped"]);

const ALSO = { household: ["devices", "job"], devices: ["plan", "links"], curve: ["job"], job: ["curve", "plan"] };

function render(sections) {
  const names = new Set(sections);
  for (const name of sections) for (const other of ALSO[name] ?? []) names.add(other);
  for (const name of Object.keys(show)) if (names.has(name)) show[name]();
}

function replaceAll(next) {
  const before = state;
  state = next;
  announce(before);
  render(Object.keys(show));
}

function merge(changed) {
  if (state === null) return;
  const before = state, sections = [];
  state = { ...state };
  for (const [name, value] of Object.entries(changed)) {
    if (name === "more") {
      state.curve = { ...state.curve, points: [...state.curve.points, ...value.points], evals: value.evals ?? state.curve.evals };
      sections.push("curve");
    } else { state[name] = value; sections.push(name); }
  }
  announce(before);
  render(sections);
}

// What somebody who does not see the page has to know.
function announce(before) {
  if (before === null) return;
  const known = new Set(before.notes.map((n) => `${n.at} ${n.text}`));
  const loud = new Set(["failure", "recovered", "warning", "done", "error", "plan", "pairing_failed", "waiting", "paused", "resumed"]);
  const news = state.notes.filter((n) => loud.has(n.kind) && !known.has(`${n.at} ${n.text}`)).map((n) => n.text);
  if (news.length) $("said").textContent = news.slice(-3).join(" ");
}

const when = (at) => new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" }).format(new Date(at * 1000));

const measured = (name) => name === "loss" ? "Loss" : name.charAt(0).toUpperCase() + name.slice(1).replaceAll("_", " ");

// -- parts --------------------------------------------------------------------------------------

const BADGES = { busy: "at work", ready: "ready", idle: "idle", trouble: "trouble", gone: "not here" };

function card(device) {
  const isGone = device.tone === "gone";  // what it said last is old
  const facts = [
    ["Kind", device.kind], ["Threads", device.threads],
    ["Alone", device.alone_samples_per_s === null ? null : `${speed(device.alone_samples_per_s)} samples/s`],
    ["Memory", device.memory_bytes === null ? null : `${device.needed_bytes === null ? "" : `${bytes(device.needed_bytes)} planned of `}${bytes(device.memory_bytes)}`],
    ["In use", isGone || device.used_bytes == null ? null : bytes(device.used_bytes)],
    ["Card’s memory", isGone || device.card_bytes == null ? null : `${device.card_needed_bytes == null ? "" : `${bytes(device.card_needed_bytes)} planned of ${bytes(device.card_offered_bytes)}, `}${bytes(device.card_used_bytes)} in use of ${bytes(device.card_bytes)}`],
    ["Load by others", isGone || device.others_cpu_percent == null ? null : `${device.others_cpu_percent}%`],
    ["Battery", isGone || device.battery_percent == null ? null : `${device.battery_percent}%${device.power === "battery" ? ", not charging" : ""}`],
    ["Temperature", isGone || device.temperature_c == null ? null : `${device.temperature_c} °C`],
    ["Address", device.address === null ? null : device.interface ? `${device.address} (${device.interface})` : device.address],
    ["Role", [device.role === "holder" ? "has the data" : null, state.household.coordinator === device.name ? "plans the work" : null].filter(Boolean).join(", ") || null],
  ].filter(([, value]) => value !== null && value !== undefined);
  const node = el("li", { class: "card", color: device.color, "data-id": device.id, "data-tone": device.tone },
    el("header", {}, el("h3", {}, device.name, device.is_here ? el("span", { class: "quiet" }, " (here)") : null), el("span", { class: "badge" }, BADGES[device.tone])),
    el("p", { class: "sentence" }, device.sentence));
  if (device.needed_bytes !== null && device.memory_bytes) {
    const fill = el("div");
    fill.style.width = `${Math.min(100, 100 * device.needed_bytes / device.memory_bytes)}%`;
    node.append(el("div", { class: "meter", "aria-hidden": "true" }, fill));
  }
  if (facts.length) node.append(el("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])));
  if (state.household.may_change && !device.is_here) {
    const button = el("button", { type: "button", class: "small danger", "aria-label": `Remove ${device.name}` }, "Remove");
    button.addEventListener("click", () => removeDevice(device));
    node.append(el("footer", {}, button));
  }
  return node;
}

const MAP_LIMIT = 10;

function drawMap() {
  const used = new Set(state.links.flatMap((l) => [l.sender, l.receiver]));
  const devices = state.devices.filter((d) => used.has(d.name));
  if (devices.length < 2 || devices.length > MAP_LIMIT) return $("map").replaceChildren();
  const width = 380, height = 280, cx = width / 2, cy = height / 2;
  const place = new Map(devices.map((d, i) => {
    const angle = 2 * Math.PI * i / devices.length - Math.PI / 2;
    return [d.name, devices.length === 2 ? [i ? width - 70 : 70, cy] : [cx + 120 * Math.cos(angle), cy + 100 * Math.sin(angle)]];
  }));
  const pairs = new Map();
  for (const link of state.links) {
    const key = [link.sender, link.receiver].sort().join("\n");
    pairs.set(key, [...(pairs.get(key) ?? []), link]);
  }
  const wires = [], rates = [];
  for (const links of pairs.values()) {
    const [a, b] = [place.get(links[0].sender), place.get(links[0].receiver)];
    if (!a || !b) continue;
    const slowest = Math.min(...links.map((l) => l.bytes_per_s ?? Infinity));
    const thick = Number.isFinite(slowest) ? Math.min(8, Math.max(1.5, Math.log10(slowest / 1e5) * 2)) : 1.5;
    wires.push(svg("line", { class: "wire", x1: a[0], y1: a[1], x2: b[0], y2: b[1], "stroke-width": thick }));
    for (const link of links) if (link.now_bytes_per_s) {
      const [from, to] = [place.get(link.sender), place.get(link.receiver)];
      wires.push(svg("line", { class: "flow", x1: from[0], y1: from[1], x2: to[0], y2: to[1] }));
    }
    if (Number.isFinite(slowest) && pairs.size <= 10) rates.push(svg("text", { class: "rate", x: 0.64 * a[0] + 0.36 * b[0], y: 0.64 * a[1] + 0.36 * b[1] + 4, "text-anchor": "middle" }, rate(slowest)));
  }
  const nodes = devices.map((d) => {
    const [x, y] = place.get(d.name), dot = svg("circle", { cx: x, cy: y, r: 12 });
    dot.style.fill = d.tone === "gone" ? "var(--line)" : `var(--c${d.color})`;
    const below = y >= cy - 1;
    return svg("g", {}, dot, svg("text", { x, y: below ? y + 30 : y - 20, "text-anchor": "middle" }, d.name));
  });
  $("map").replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Map of ${devices.length} devices and their links, as in the table` }, ...wires, ...rates, ...nodes));
}

function qr(modules) {
  const size = modules.length;
  let path = "";
  modules.forEach((row, y) => [...row].forEach((m, x) => { if (m === "1") path += `M${x} ${y}h1v1h-1z`; }));
  return svg("svg", { viewBox: `-3 -3 ${size + 6} ${size + 6}`, role: "img", "aria-label": "The command as a QR code", "shape-rendering": "crispEdges" },
    svg("rect", { x: -3, y: -3, width: size + 6, height: size + 6, fill: "#fff" }), svg("path", { d: path, fill: "#000" }));
}

function countDown() {
  const pairing = state?.pairing;
  if (!pairing) return;
  $("pairing-left").textContent = `For ${duration(pairing.closes_at - Date.now() / 1000)} more. Devices that are paired need no code.`;
}
setInterval(countDown, 1000);

// -- what can be done ---------------------------------------------------------------------------

function ask(title, text, yes) {
  $("ask-title").textContent = title;
  $("ask-text").textContent = text;
  $("ask-yes").textContent = yes;
  $("ask").returnValue = "no";
  $("ask").showModal();
  return new Promise((resolve) => $("ask").addEventListener("close", () => resolve($("ask").returnValue === "yes"), { once: true }));
}

async function post(path, body) {
  notice("");
  try {
    const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    if (!answer.ok) notice((await answer.json().catch(() => null))?.error ?? `The device refused that (${answer.status}).`);
  } catch { notice("The device does not answer."); }
}

async function removeDevice(device) {
  if (await ask(`Remove ${device.name}?`, "Its connections end at once, and it has to be paired again to come back. Trainings go on without it.", "Remove")) await post("/api/remove", { name: device.id });
}

$("invite").addEventListener("click", () => post("/api/invite", {}));
$("pause").addEventListener("click", () => state?.job && post(state.job.state === "paused" ? "/api/resume" : "/api/pause", { run: state.job.run }));
$("stop").addEventListener("click", async () => {
  const job = state?.job;
  if (job && await ask("Stop this training?", `Weights that were not saved with --checkpoint on ${job.holder} are lost. The other devices are let go.`, "Stop")) await post("/api/stop", { run: job.run });
});

function notice(text) { $("notice").textContent = text; $("notice").hidden = !text; }

// -- what is asked for while it is looked at ------------------------------------------------------

async function get(path) {
  const answer = await fetch(path).catch(() => null);
  if (!answer) throw new Error("The device does not answer.");
  const body = await answer.json().catch(() => null);
  if (!answer.ok || !body) throw new Error(body?.error ?? `The device refused that (${answer.status}).`);
  return body;
}

let watching = null;

async function watchRounds() {
  clearTimeout(watching);
  if (!$("rounds").open || $("rounds").hidden || document.hidden) return;
  try {
    const picture = await get("/rounds");
    $("rounds-caption").textContent = caption(picture);
    if (picture.rounds.length) {
      drawRounds($("rounds-picture"), picture, new Map(state.devices.map((d) => [d.name, d.color])));
      $("rounds-words").replaceChildren(...summary(picture).map((line) => el("li", {}, line)));
    }
  } catch (error) { $("rounds-caption").textContent = error.message; }
  clearTimeout(watching);
  watching = setTimeout(watchRounds, ROUNDS_MS);
}
$("rounds").addEventListener("toggle", watchRounds);
document.addEventListener("visibilitychange", watchRounds);

$("ask-advice").addEventListener("click", async () => {
  $("ask-advice").disabled = true;
  $("advice-state").textContent = "Rounds are watched and the planner is asked. That takes some seconds.";
  try {
    const { points } = await get("/advice");
    const told = points.filter((p) => ["limit", "change", "advice"].includes(p.about));
    $("advice").replaceChildren(...told.map((p) => el("li", {}, `${p.text.charAt(0).toUpperCase()}${p.text.slice(1)}.`)));
    $("advice-state").textContent = "";
  } catch (error) { $("advice-state").textContent = error.message; }
  $("ask-advice").disabled = false;
});

// -- the stream ---------------------------------------------------------------------------------

let stream = null, heardAt = 0, isLost = false;

function setLive(kind, text) {
  if ($("live").dataset.state === kind) return;
  $("live").dataset.state = kind;
  $("live-text").textContent = text;
}

function heard() {
  heardAt = Date.now();
  isLost = false;
  setLive("live", "Live");
}

function connect() {
  stream?.close();
  heardAt = Date.now();
  stream = new EventSource("/events");
  stream.addEventListener("state", (event) => { heard(); notice(""); replaceAll(JSON.parse(event.data)); });
  stream.addEventListener("change", (event) => { heard(); merge(JSON.parse(event.data)); });
  stream.addEventListener("alive", heard);
  stream.addEventListener("error", lost);
}

async function lost() {
  setLive("lost", "Not connected. Trying again");
  if (stream.readyState !== EventSource.CLOSED || isLost) return;
  isLost = true;  // and the browser does not try again by itself
  const answer = await fetch("/state").catch(() => null);
  if (answer?.status === 403) notice("This browser is not let in any more.\nRun  p2ptrain page  on the device and open the address that it prints.");
  else if (answer?.status === 503) notice("Too many browsers look at this page already.");
  setTimeout(() => { isLost = false; if (!document.hidden) connect(); }, AGAIN_MS);
}

// A browser has six connections to a device: tabs that nobody sees leave theirs to others.
let resting = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(resting);
  if (document.hidden) resting = setTimeout(() => { stream.close(); setLive("resting", "Paused"); }, HIDDEN_MS);
  else if (stream.readyState === EventSource.CLOSED) connect();
});

setInterval(() => { if (!document.hidden && Date.now() - heardAt > SILENT_MS) { setLive("lost", "Not connected. Trying again"); connect(); } }, 5000);

if (location.search) history.replaceState(null, "", "/");
connect();
