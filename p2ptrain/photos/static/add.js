// Pictures from this device into the holder's folder: made smaller here, sorted by tap, sent.
const $ = (id) => document.getElementById(id);
const SIDE = 640, QUALITY = 0.9, AT_ONCE = 2, SEND_MS = 130000, LOOK_MS = 4000;

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const many = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
const put = (id, text) => { if ($(id).textContent !== text) $(id).textContent = text; };

let state = null;
const chosen = [];              // {blob, tile, text, label, state: new|labelled|sent|failed, why}
const own = new Set();          // labels made here, which have no folder yet
let active = null;              // the label that a tap gives
let sending = false;

// -- what the device says -----------------------------------------------------------------------

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { signal: AbortSignal.timeout(SEND_MS), ...options });
  } catch {
    throw new Error("The device that takes the pictures is not reached: is it on, and in this network?");
  }
  const text = await answer.text();
  let body = {};
  try { body = JSON.parse(text); } catch { /* a refusal, as text */ }
  if (!answer.ok) throw new Error(body.error ?? (text.trim() || `refused (${answer.status})`));
  return body;
}

function notice(text) {
  put("notice", text ?? "");
  $("notice").hidden = !text;
}

async function look() {
  try {
    state = await ask("/add/state");
    notice(state.folder === null ? state.why : null);
  } catch (error) {
    notice(error.message);
    return;
  }
  put("who", `to ${state.device}`);
  for (const id of ["where", "choose"]) $(id).hidden = state.folder === null;
  if (state.folder === null) return;
  put("device", state.device);
  put("folder", state.folder);
  put("way", `They are made smaller here first (${SIDE} pixels at most), without the place and the time that the camera wrote into them.` +
    (state.is_near ? "" : " On their way through this network they are not encrypted, and browsers that were let in here see them."));
  showLabels();
  $("counts").replaceChildren(...state.labels.map((label) => el("div", {}, el("dt", {}, label.name), el("dd", {}, label.pictures.toLocaleString("en")))));
  $("there").hidden = state.labels.length === 0;
  showDoubts();
}

// -- labels -------------------------------------------------------------------------------------

function labels() {
  const there = state.labels.map((label) => label.name);
  return [...there, ...[...own].filter((name) => !there.includes(name))];
}

let shownLabels = "";
function showLabels() {
  const names = labels();
  if (!names.includes(active)) active = names[0] ?? null;
  const key = JSON.stringify([names, active]);
  if (key === shownLabels) return;
  shownLabels = key;
  const hadFocus = $("labels").contains(document.activeElement);
  $("labels").replaceChildren(...names.map((name) => {
    const button = el("button", { type: "button", "aria-pressed": String(name === active) }, name);
    button.addEventListener("click", () => { active = name; showLabels(); });
    return button;
  }));
  if (hadFocus) $("labels").querySelector("[aria-pressed=true]")?.focus();
  showTiles();
}

$("new-label").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("label-name").value;
  if (!text.trim()) return;
  let name;
  try {
    name = (await ask(`/add/label?text=${encodeURIComponent(text)}`)).label;
  } catch (error) {
    put("sent", error.message);
    return;
  }
  put("sent", "");
  const known = labels().find((other) => other.toLowerCase() === name.toLowerCase());
  if (!known) own.add(name);
  active = known ?? name;
  $("label-name").value = "";
  showLabels();
});

// -- pictures of this device --------------------------------------------------------------------

async function opened(file) {
  try {
    return await createImageBitmap(file, { imageOrientation: "from-image" });
  } catch (error) {
    if (error instanceof TypeError) return createImageBitmap(file); // older browsers turn it anyway
    throw error;
  }
}

function drawn(bitmap, width, height) {
  const canvas = el("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff"; // behind what is transparent
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas;
}

// By halves, since some browsers look at few pixels and turn fine patterns into noise.
function smaller(bitmap, side) {
  const factor = Math.min(1, side / Math.max(bitmap.width, bitmap.height));
  const width = Math.max(1, Math.round(bitmap.width * factor)), height = Math.max(1, Math.round(bitmap.height * factor));
  let from = bitmap;
  while (from.width > 2 * width && from.height > 2 * height) from = drawn(from, Math.ceil(from.width / 2), Math.ceil(from.height / 2));
  return drawn(from, width, height);
}

async function take(file) {
  const bitmap = await opened(file);
  const canvas = smaller(bitmap, SIDE);
  bitmap.close();
  const blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", QUALITY));
  if (blob === null) throw new Error("nothing was drawn");
  const text = el("span");
  const tile = el("button", { type: "button", class: "tile" }, smaller(canvas, 240), text);
  const picture = { blob, tile, text, label: null, state: "new", why: "" };
  tile.addEventListener("click", () => {
    if (active === null) { put("sent", "Add a label first."); $("label-name").focus(); return; }
    picture.label = picture.label === active ? null : active;
    picture.state = picture.label === null ? "new" : "labelled";
    showTiles();
  });
  return picture;
}

$("files").addEventListener("change", async () => {
  const files = [...$("files").files], failed = [];
  $("files").value = "";
  for (const [at, file] of files.entries()) { // one by one: a phone's pictures are large
    put("read", `Making them smaller: ${at + 1} of ${files.length}`);
    try {
      const picture = await take(file);
      chosen.push(picture);
      $("tiles").append(el("li", {}, picture.tile));
      $("sort").hidden = false;
      showTiles();
    } catch {
      failed.push(file);
    }
  }
  const heic = failed.some((file) => /\.hei[cf]$/i.test(file.name) || /hei[cf]/.test(file.type));
  put("read", failed.length === 0 ? `${many(files.length, "picture")} chosen.` :
    `This browser cannot read ${failed.map((file) => file.name).join(", ")}. ` +
    (heic ? "HEIC pictures: choose them in the phone's own browser, which hands over JPEG, or set the camera to JPEG (on an iPhone: Settings, Camera, Formats, Most Compatible)." : "Choose JPEG, PNG or WebP."));
});

function showTiles() {
  for (const [at, picture] of chosen.entries()) {
    picture.tile.dataset.state = picture.state;
    picture.tile.disabled = sending || picture.state === "sent";
    const said = { failed: picture.why, sent: `✓ ${picture.label}` }[picture.state] ?? picture.label ?? "no label";
    if (picture.text.textContent !== said) picture.text.textContent = said;
    picture.tile.setAttribute("aria-label", `Picture ${at + 1}: ${said}`);
  }
  const ready = toSend().length;
  const rest = chosen.filter((picture) => picture.state === "new").length;
  $("upload").disabled = sending || ready === 0;
  put("upload", ready === 0 ? "Upload" : `Upload ${many(ready, "picture")}`);
  $("rest").hidden = sending || rest === 0 || active === null;
  put("rest", `${rest === chosen.length ? "All" : `The other ${rest}`}: ${active}`);
}

const toSend = () => chosen.filter((picture) => picture.label !== null && picture.state !== "sent");

$("rest").addEventListener("click", () => {
  for (const picture of chosen) if (picture.state === "new") { picture.label = active; picture.state = "labelled"; }
  showTiles();
});

// -- on their way -------------------------------------------------------------------------------

$("upload").addEventListener("click", async () => {
  const waiting = toSend(), total = waiting.length, elsewhere = new Set();
  let done = 0, known = 0, failed = 0;
  function progress() {
    const part = Math.round(100 * done / total);
    $("bar-fill").style.width = `${part}%`;
    $("bar").setAttribute("aria-valuenow", part);
    put("sent", `${done} of ${total}`);
    showTiles();
  }
  async function work() {
    for (let picture = waiting.shift(); picture; picture = waiting.shift()) {
      try {
        const added = await ask(`/add/picture?label=${encodeURIComponent(picture.label)}`, { method: "PUT", body: picture.blob, headers: { "Content-Type": "image/jpeg" } });
        if (!added.is_new) known += 1;
        if (!added.is_new && added.label !== picture.label) elsewhere.add(added.label);
        Object.assign(picture, { label: added.label, state: "sent", blob: null });
      } catch (error) {
        Object.assign(picture, { state: "failed", why: error.message });
        failed += 1;
      }
      done += 1;
      progress();
    }
  }
  sending = true;
  $("bar").hidden = false;
  progress();
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  sending = false;
  $("bar").hidden = true;
  const added = total - failed - known;
  put("sent", [
    added ? `${many(added, "picture")} added on ${state.device}.` : "",
    known ? `${known} ${known === 1 ? "was" : "were"} there already${elsewhere.size ? `, and stay under ${[...elsewhere].join(", ")}` : ""}.` : "",
    failed ? `${failed} did not arrive: the pictures say why. Tap Upload to try again.` : "",
  ].filter(Boolean).join(" "));
  showTiles();
  await look();
});

addEventListener("beforeunload", (event) => { if (toSend().length) event.preventDefault(); });

// -- what the network doubts --------------------------------------------------------------------

const address = (picture) => `/add/picture?label=${encodeURIComponent(picture.label)}&file=${encodeURIComponent(picture.file)}`;

let shownDoubts = "";
function showDoubts() {
  const doubts = state.uncertain;
  $("doubts").hidden = doubts.evaluated === 0;
  put("doubts-text", `Of the ${many(doubts.evaluated, "picture")} evaluated after step ${doubts.step.toLocaleString("en")}, the most doubtful first. ` +
    "Tap one whose label is wrong. A training that runs now goes on with the labels it began with; the next one uses yours.");
  const key = JSON.stringify(doubts.pictures);
  if (key === shownDoubts || $("ask").open) return;
  shownDoubts = key;
  $("doubted").replaceChildren(...doubts.pictures.map((picture) => {
    const sure = `${Math.round(100 * picture.sure)}% ${picture.label}`;
    const said = picture.guess === picture.label ? sure : `${sure}, rather ${picture.guess}`;
    const tile = el("button", { type: "button", class: "tile", "aria-label": `Labelled ${picture.label}. The network: ${said}` },
      el("img", { src: address(picture), alt: "", loading: "lazy" }), el("span", {}, said));
    tile.addEventListener("click", () => correct(picture));
    return el("li", {}, tile);
  }));
}

function correct(picture) {
  const dialog = $("ask");
  $("ask-picture").src = address(picture);
  $("ask-labels").replaceChildren(...labels().map((name) => el("button", { value: name, "aria-pressed": String(name === picture.label) }, name)));
  dialog.returnValue = "";
  dialog.addEventListener("close", async () => {
    const to = dialog.returnValue;
    if (to === "" || to === picture.label) return;
    const body = JSON.stringify({ label: picture.label, file: picture.file, to });
    try {
      const moved = await ask("/add/move", { method: "POST", body, headers: { "Content-Type": "application/json" } });
      put("moved", `It is under ${moved.label} now. The next training uses that.`);
    } catch (error) {
      put("moved", error.message);
    }
    await look();
  }, { once: true });
  dialog.showModal();
}

// -- looking again, while somebody does ---------------------------------------------------------

async function follow() {
  if (document.visibilityState === "visible" && !sending) await look();
  setTimeout(follow, LOOK_MS);
}
follow();
