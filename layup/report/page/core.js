"use strict";
// What all pages share: units, small DOM helpers, colours, and a canvas that pans and zooms.

const $ = (id) => document.getElementById(id);
const errors = [];
window.addEventListener("error", (event) => errors.push(event.message));
window.addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(node.style, value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

// -- units ---------------------------------------------------------------------------------------------------------

function bytes(n) {
  const sign = n < 0 ? "−" : "";
  let size = Math.abs(n);
  for (const unit of ["B", "KiB", "MiB"]) {
    if (size < 1024) return sign + (unit === "B" ? size.toFixed(0) : trim(size)) + " " + unit;
    size /= 1024;
  }
  return sign + trim(size) + " GiB";
}
const roundBytes = (n) => bytes(n).replace(/\.0+ /, " ");
const trim = (size) => size.toFixed(size >= 100 ? 1 : 2);
const whole = (n) => Math.round(n).toLocaleString("en-US");
const plural = (n, one, many = one + "s") => whole(n) + " " + (n === 1 ? one : many);

function seconds(ns) {
  const size = Math.abs(ns);
  if (size < 1e3) return ns.toFixed(0) + " ns";
  if (size < 1e6) return (ns / 1e3).toFixed(size < 1e4 ? 2 : 1) + " µs";
  if (size < 1e9) return (ns / 1e6).toFixed(size < 1e7 ? 3 : size < 1e8 ? 2 : 1) + " ms";
  return (ns / 1e9).toFixed(3) + " s";
}
const tickSeconds = (ns) => (ns === 0 ? "0" : seconds(ns).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ").replace("-", "−"));
const percent = (part, all) => (all ? (100 * part / all).toFixed(part && part < all / 100 ? 2 : 1) : "0") + " %";

// Round numbers of a scale: at most `count` of them, in steps of 1, 2 or 5 (or powers of two, for bytes).
function ticks(low, high, count, binary = false) {
  const span = high - low;
  if (!(span > 0)) return [low];
  let step;
  if (binary) {
    step = 2 ** Math.max(0, Math.ceil(Math.log2(span / count)));
  } else {
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
    step = power * ([1, 2, 5, 10].find((m) => m * power >= raw) || 10);
  }
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(tick);
  return found;
}

// -- colours -------------------------------------------------------------------------------------------------------
// Okabe and Ito's palette: told apart by people with any colour vision; recomputed buffers are hatched besides.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
let palette = {};
const hatches = new Map();

function readPalette() {
  hatches.clear();
  palette = {};
  for (const name of ["paper", "panel", "ink", "soft", "faint", "line", "grid", "accent", "good", "bad", "stripe",
    "weight", "activation", "gradient", "weight-gradient", "optimizer", "workspace", "input", "recompute", "offload",
    "add", "plain"]) palette[name] = css(name);
}

const OP_COLOURS = {
  FORWARD: "activation", RECOMPUTE: "recompute", BACKWARD_DATA: "gradient", BACKWARD_WEIGHT: "weight-gradient",
  ADD: "add", UPDATE: "optimizer", OFFLOAD: "offload", PREFETCH: "offload", LOAD: "weight", STORE: "weight",
  INPUT: "plain", FETCH: "plain", HOLD: "faint",
};
const OP_NAMES = {
  FORWARD: "forward", RECOMPUTE: "recompute", BACKWARD_DATA: "backward, data", BACKWARD_WEIGHT: "backward, weights",
  ADD: "add gradients", UPDATE: "update", OFFLOAD: "offload to host", PREFETCH: "prefetch from host",
  LOAD: "load parameters", STORE: "store parameters", INPUT: "batch in", FETCH: "result out", HOLD: "end of the step",
};
const DECISION_COLOURS = { keep: "activation", offload: "offload", recompute: "recompute", streamed: "optimizer", "": "plain" };
const HATCHED_OPS = new Set(["RECOMPUTE"]);
const opColour = (op) => OP_COLOURS[op] || "optimizer";
const categoryColour = (category) => category.replace(" ", "-");

function hatch(context, colour) {
  if (!hatches.has(colour)) {
    const tile = el("canvas");
    tile.width = tile.height = 8;
    const c = tile.getContext("2d");
    c.fillStyle = colour;
    c.fillRect(0, 0, 8, 8);
    c.strokeStyle = "rgba(255,255,255,.72)";
    c.lineWidth = 1.6;
    c.beginPath();
    for (const shift of [-8, 0, 8]) { c.moveTo(shift - 1, 9); c.lineTo(shift + 9, -1); }
    c.stroke();
    hatches.set(colour, tile);
  }
  return context.createPattern(hatches.get(colour), "repeat");
}

function swatch(colour, hatched = false) {
  return el("i", { class: "swatch" + (hatched ? " hatched" : ""), style: { backgroundColor: `var(--${colour})` } });
}
const legendEntry = (colour, text, hatched = false) => el("span", {}, swatch(colour, hatched), text);

// Black or white, whichever is read better on a colour.
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16) / 255);
  return 0.299 * r + 0.587 * g + 0.114 * b > 0.52 ? "#10151a" : "#ffffff";
}

// -- controls ------------------------------------------------------------------------------------------------------

// Buttons of which one is pressed: choices are [value, text] pairs.
function chooser(label, choices, value, onchange) {
  const group = el("div", { class: "group", role: "group", "aria-label": label }, el("span", {}, label));
  const buttons = choices.map(([key, text]) => {
    const button = el("button", { type: "button", "aria-pressed": String(key === value), "data-value": key }, text);
    button.addEventListener("click", () => group.choose(key));
    group.append(button);
    return button;
  });
  group.choose = (key) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === key));
    onchange(key);
  };
  return group;
}

function zoomButtons(board) {
  const group = el("div", { class: "group", role: "group", "aria-label": "zoom" });
  for (const [text, title, act] of [["−", "zoom out", () => board.zoom(2)], ["+", "zoom in", () => board.zoom(0.5)],
    ["Fit", "show all", () => board.fit()]]) {
    group.append(el("button", { type: "button", title, "aria-label": title, onclick: act }, text));
  }
  return group;
}

function savePicture(board, name) {
  return el("button", { type: "button", title: "Save this picture as PNG", onclick: () => {
    el("a", { href: board.canvas.toDataURL("image/png"), download: name + ".png" }).click();
  } }, "Save PNG");
}

const tip = {
  show(text, event) {
    const box = $("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const x = event.clientX + 14 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 14;
    const y = Math.min(event.clientY + 16, innerHeight - height - 6);
    box.style.left = Math.max(4, x) + "px";
    box.style.top = Math.max(4, y) + "px";
  },
  hide() { $("tip").hidden = true; },
};

// -- a canvas that pans and zooms ----------------------------------------------------------------------------------

// `owner` draws and answers: draw(board, context), at(board, x, y, event) for the pointer, click, leave, key, height(width).
class Board {
  constructor(host, label, owner) {
    this.owner = owner;
    this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": label });
    host.append(this.canvas);
    this.left = 70; this.right = 14;
    this.full = [0, 1]; this.view = [0, 1]; // x, in units of the data
    this.fullY = [0, 1]; this.viewY = [0, 1];
    this.bandY = [0, 1]; // pixels between which y is drawn
    this.closest = 4; // least extent of x
    this.pending = false;
    this.pointers = new Map();
    this.moved = false;
    new ResizeObserver(() => this.redraw()).observe(host);
    this.listen();
  }

  get context() { return this.canvas.getContext("2d"); }
  x(value) { return this.left + (value - this.view[0]) / (this.view[1] - this.view[0]) * (this.width - this.left - this.right); }
  unx(px) { return this.view[0] + (px - this.left) / (this.width - this.left - this.right) * (this.view[1] - this.view[0]); }
  y(value) { return this.bandY[1] - (value - this.viewY[0]) / (this.viewY[1] - this.viewY[0]) * (this.bandY[1] - this.bandY[0]); }
  uny(py) { return this.viewY[0] + (this.bandY[1] - py) / (this.bandY[1] - this.bandY[0]) * (this.viewY[1] - this.viewY[0]); }

  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.drawNow(); });
  }

  drawNow() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return; // on a page that is not shown
    const height = this.owner.height(width), scale = window.devicePixelRatio || 1;
    this.width = width; this.height = height;
    const w = Math.round(width * scale), h = Math.round(height * scale);
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w; this.canvas.height = h;
      this.canvas.style.height = height + "px";
    }
    const c = this.context;
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, width, height);
    c.font = "12px " + css("sans");
    c.textBaseline = "middle";
    this.owner.draw(this, c);
  }

  setFull(x0, x1, keepView = false) {
    this.full = [x0, Math.max(x1, x0 + 1e-9)];
    if (!keepView) this.view = [...this.full];
    this.clamp();
  }

  fit() { this.view = [...this.full]; this.viewY = [...this.fullY]; this.redraw(); }

  clamp() {
    for (const [view, full, least] of [[this.view, this.full, this.closest], [this.viewY, this.fullY, (this.fullY[1] - this.fullY[0]) / 5000]]) {
      const span = Math.min(Math.max(view[1] - view[0], Math.min(least, full[1] - full[0])), full[1] - full[0]);
      const start = Math.min(Math.max(view[0], full[0]), full[1] - span);
      view[0] = start; view[1] = start + span;
    }
  }

  zoom(factor, px = (this.left + this.width - this.right) / 2) {
    const at = this.unx(px);
    this.view = [at + (this.view[0] - at) * factor, at + (this.view[1] - at) * factor];
    this.clamp(); this.redraw();
  }

  zoomY(factor, py = (this.bandY[0] + this.bandY[1]) / 2) {
    const at = this.uny(py);
    this.viewY = [at + (this.viewY[0] - at) * factor, at + (this.viewY[1] - at) * factor];
    this.clamp(); this.redraw();
  }

  pan(dx, dy = 0) {
    const sx = (this.view[1] - this.view[0]) / (this.width - this.left - this.right);
    const sy = (this.viewY[1] - this.viewY[0]) / (this.bandY[1] - this.bandY[0]);
    this.view = this.view.map((v) => v - dx * sx);
    this.viewY = this.viewY.map((v) => v + dy * sy);
    this.clamp(); this.redraw();
  }

  // Bring a stretch into view, with some room around it.
  reveal(x0, x1, room = 0.6) {
    const span = Math.max(x1 - x0, this.closest);
    this.view = [x0 - span * room, x1 + span * room];
    this.clamp(); this.redraw();
  }

  listen() {
    const canvas = this.canvas;
    const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    canvas.addEventListener("wheel", (event) => {
      const [px, py] = place(event);
      if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY * 0.004), px);
      else if (event.altKey) this.zoomY(Math.exp(event.deltaY * 0.004), py);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(-event.deltaX);
      else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, place(event));
      this.moved = false;
    });
    canvas.addEventListener("pointermove", (event) => {
      const [px, py] = place(event);
      const before = this.pointers.get(event.pointerId);
      if (!before) { this.owner.at(this, px, py, event); return; }
      if (this.pointers.size === 2) {
        const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, p]) => p);
        const factor = Math.max(8, Math.abs(before[0] - other[0])) / Math.max(8, Math.abs(px - other[0]));
        this.zoom(factor, (px + other[0]) / 2);
        this.moved = true;
      } else if (this.moved || Math.hypot(px - before[0], py - before[1]) > 4) {
        this.pan(px - before[0], py - before[1]);
        this.moved = true;
        tip.hide();
      } else {
        return;
      }
      this.pointers.set(event.pointerId, [px, py]);
    });
    const up = (event) => {
      const [px, py] = place(event);
      const down = this.pointers.delete(event.pointerId);
      if (down && !this.moved && event.type === "pointerup") this.owner.click(this, px, py, event);
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => { tip.hide(); this.owner.leave(this); });
    canvas.addEventListener("dblclick", (event) => { const [px, py] = place(event); this.owner.dive(this, px, py); });
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const step = (this.width - this.left - this.right) / 8;
      const keys = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.fit(),
        Home: () => this.fit(), a: () => this.pan(step), d: () => this.pan(-step), w: () => this.zoom(0.5), s: () => this.zoom(2) };
      const act = keys[event.key] || keys[event.key.toLowerCase()];
      if (act) act(); else if (!this.owner.key(this, event)) return;
      event.preventDefault();
    });
  }
}

// -- drawing helpers -----------------------------------------------------------------------------------------------

function axisY(board, c, top, bottom, low, high, format, count = 4, binary = true, grid = true) {
  c.textAlign = "right";
  for (const tick of ticks(low, high, count, binary)) {
    const y = bottom - (tick - low) / (high - low) * (bottom - top);
    if (y < top - 1 || y > bottom + 1) continue;
    if (grid) { c.fillStyle = palette.grid; c.fillRect(board.left, Math.round(y), board.width - board.left - board.right, 1); }
    c.fillStyle = palette.soft;
    c.fillText(format(tick), board.left - 7, Math.max(y, top + 6));
  }
}

function axisX(board, c, y, format, title, count) {
  c.textAlign = "center";
  const room = c.measureText(title).width + 16;
  for (const tick of ticks(board.view[0], board.view[1], count)) {
    const x = board.x(tick);
    if (x < board.left - 1 || x > board.width - board.right + 1) continue;
    c.fillStyle = palette.line;
    c.fillRect(Math.round(x), y, 1, 5);
    c.fillStyle = palette.soft;
    if (x < board.width - board.right - room) c.fillText(format(tick), x, y + 13);
  }
  c.textAlign = "right";
  c.fillStyle = palette.soft;
  c.fillText(title, board.width - board.right, y + 13);
}

function horizontal(board, c, y, colour, text, dash, side = "right") {
  c.save();
  c.strokeStyle = colour;
  c.setLineDash(dash);
  c.lineWidth = 1.5;
  c.beginPath(); c.moveTo(board.left, y); c.lineTo(board.width - board.right, y); c.stroke();
  c.restore();
  if (text) label(c, text, side === "right" ? board.width - board.right - 4 : board.left + 5, y + 9, colour, side);
}

// Text on a ground of its own, so that it can be read on anything.
function label(c, text, x, y, colour, align = "left") {
  const width = c.measureText(text).width;
  const from = align === "right" ? x - width : align === "center" ? x - width / 2 : x;
  c.globalAlpha = 0.86;
  c.fillStyle = palette.panel;
  c.fillRect(from - 3, y - 8, width + 6, 16);
  c.globalAlpha = 1;
  c.fillStyle = colour;
  c.textAlign = "left";
  c.fillText(text, from, y);
}

function clipped(c, text, width) {
  if (c.measureText(text).width <= width) return text;
  let length = Math.floor(text.length * width / c.measureText(text).width);
  while (length > 1 && c.measureText(text.slice(0, length) + "…").width > width) length--;
  return length > 1 ? text.slice(0, length) + "…" : "";
}
