// Lifetimes: address by row. The curve above, pinned memory below, and what a row or a buffer is, beside it.

const MOVES = { OFFLOAD: 1, STORE: 1, FETCH: 1, PREFETCH: -1, LOAD: -1, INPUT: -1 }; // 1: to the host

class Lifetimes {
  constructor(report, views) {
    this.report = report;
    this.views = views;
    this.which = "plan";
    this.mode = "row";
    this.colouring = "role";
    this.sameScale = false;
    this.wanted = "";
    this.picked = -1; // the buffer that was clicked
    this.over = -1; // the one under the pointer
    this.row = views.plan.data.peak_row; // the row whose residents are listed
    this.board = new Board($("lifetimes-chart"), "Lifetimes of all buffers: address by row", this);
    this.legend = el("div", { class: "legend" });
    this.controls();
    this.rescale();
    this.details();
  }

  get view() { return this.views[this.which]; }

  controls() {
    const views = [["plan", this.report.plan.policy === "naive" ? "this plan" : "plan " + this.report.plan.policy]];
    if (this.views.naive) views.push(["naive", "naive"]);
    this.viewChooser = chooser("show", views, "plan", (key) => this.show(key));
    const scale = el("input", { type: "checkbox", onchange: (event) => { this.sameScale = event.target.checked; this.rescale(); } });
    const find = el("input", { type: "search", placeholder: "find a layer", "aria-label": "find a layer or buffer",
      oninput: (event) => { this.wanted = event.target.value.trim().toLowerCase(); this.board.redraw(); },
      onkeydown: (event) => { if (event.key === "Enter") this.findNext(); } });
    $("lifetimes-controls").append(
      this.viewChooser,
      this.views.naive ? el("label", {}, scale, "same scale") : null,
      chooser("across", [["row", "rows"], ["time", "predicted time"]], "row", (key) => this.across(key)),
      chooser("colour by", [["role", "role"], ["decision", "decision"]], "role", (key) => {
        this.colouring = key; this.showLegend(); this.board.redraw(); this.details();
      }),
      zoomButtons(this.board),
      el("button", { type: "button", onclick: () => this.peak() }, "Peak"),
      find,
      savePicture(this.board, "lifetimes"),
    );
    $("lifetimes-chart").before(this.legend);
    $("lifetimes-chart").parentElement.before(this.legend);
    this.showLegend();
  }

  showLegend() {
    const entries = [];
    if (this.colouring === "role") {
      const present = new Set(this.view.category);
      for (const name of this.report.category_names) if (present.has(name)) entries.push(legendEntry(categoryColour(name), name));
      if (this.view.op.includes("RECOMPUTE")) entries.push(legendEntry("activation", "recomputed", true));
    } else {
      const present = new Set(this.view.decision);
      for (const name of this.report.decisions) {
        if (present.has(name)) entries.push(legendEntry(DECISION_COLOURS[name], name || "no decision: weights, gradients, scratch", name === "recompute"));
      }
    }
    if (this.view.op.some((op) => op === "OFFLOAD" || op === "STORE")) entries.push(el("span", {}, "↓ to pinned memory"), el("span", {}, "↑ back"));
    this.legend.replaceChildren(...entries);
  }

  show(which) {
    const rows = [this.rowAt(this.board.left), this.row];
    this.which = which;
    this.picked = this.over = -1;
    this.row = which === "plan" || rows[1] >= this.view.rows ? this.view.data.peak_row : Math.min(rows[1], this.view.rows - 1);
    this.rescale();
    this.showLegend();
    this.explain();
    this.peakRow();
  }

  peakRow() { this.row = this.view.data.peak_row; this.details(); this.board.redraw(); }

  across(mode) {
    const first = this.rowAt(this.board.x(this.board.view[0])), last = this.rowAt(this.board.x(this.board.view[1]));
    const all = this.board.view[0] <= this.board.full[0] && this.board.view[1] >= this.board.full[1];
    this.mode = mode;
    this.rescale();
    if (!all) this.board.view = [this.X(first), this.X(Math.max(last, first + 1))];
    this.board.clamp();
    this.board.redraw();
  }

  // Position of the boundary before row k.
  X(k) { return this.mode === "row" ? k : this.view.reached[k]; }

  rowAt(px) {
    const v = this.board.unx(px), view = this.view;
    if (this.mode === "row") return Math.min(Math.max(Math.floor(v), 0), view.rows - 1);
    let low = 0, high = view.rows - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (view.reached[middle] <= v) low = middle; else high = middle - 1; }
    return low;
  }

  rescale() {
    const shown = this.sameScale ? Object.values(this.views) : [this.view];
    const budget = this.report.memory_bytes;
    let top = 0;
    for (const view of shown) top = Math.max(top, view.data.reserved_bytes, view.data.peak_bytes);
    if (budget && budget < 1.6 * top) top = Math.max(top, budget);
    this.top = top * 1.04;
    this.board.fullY = [0, this.top / this.report.block];
    this.board.viewY = [...this.board.fullY];
    this.hostTop = Math.max(...shown.map((view) => view.data.host_bytes), 512) * 1.02;
    this.board.closest = this.mode === "row" ? 4 : (this.view.reached[this.view.rows] - this.view.reached[0]) / 1e5;
    this.board.setFull(this.X(0), this.X(this.view.rows));
    this.board.redraw();
  }

  peak() {
    this.row = this.view.data.peak_row;
    this.picked = -1;
    const around = Math.max(12, this.view.rows / 40);
    this.board.viewY = [...this.board.fullY];
    this.board.reveal(this.X(Math.max(0, Math.floor(this.row - around))), this.X(Math.min(this.view.rows, Math.ceil(this.row + around))), 0);
    this.details();
  }

  findNext() {
    if (!this.wanted) return;
    const matches = [];
    for (let i = 0; i < this.view.count; i++) if (!this.view.fixed[i] && this.matches(i)) matches.push(i);
    if (!matches.length) return;
    this.pick(matches[(matches.indexOf(this.picked) + 1) % matches.length]);
    this.board.reveal(this.X(this.view.first[this.picked]), this.X(this.view.last[this.picked]));
  }

  matches(i) { return (this.view.name(i) + "\n" + this.view.layer(i)).toLowerCase().includes(this.wanted); }

  height(width) {
    const top = $("lifetimes-chart").getBoundingClientRect().top + scrollY;
    const height = Math.max(420, Math.min(900, innerHeight - top - 52));
    $("lifetimes-details").style.maxHeight = width > 640 && innerWidth > 1000 ? height + "px" : "";
    return height;
  }

  layout(board) {
    const host = this.view.pinned.events ? Math.round(board.height * 0.15) : 0;
    const strip = 9, axis = 24, links = 28, gap = 26;
    const curve = Math.round((board.height - host - strip - axis - links - 2 * gap) * 0.27);
    const p = {};
    p.curve = [gap, gap + curve];
    p.slab = [p.curve[1] + gap, board.height - axis - strip - host - links - 4];
    p.links = [p.slab[1], p.slab[1] + links];
    p.host = [p.links[1], p.links[1] + host];
    p.strip = [p.host[1] + 4, p.host[1] + 4 + strip];
    p.axis = p.strip[1];
    board.bandY = p.slab;
    return p;
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  draw(board, c) {
    const view = this.view, p = this.panels = this.layout(board);
    c.fillStyle = palette.ink;
    c.textAlign = "left";
    const title = (text, y) => { c.fillStyle = palette.ink; c.font = "600 12px " + css("sans"); c.textAlign = "left"; c.fillText(text, 8, y); c.font = "12px " + css("sans"); };
    title("Bytes alive", p.curve[0] - 10);
    title("Slab, by address", p.slab[0] - 10);
    title("Pinned", p.links[0] + 15);
    const size = (blocks) => roundBytes(blocks * this.report.block);
    axisY(board, c, ...p.curve, 0, this.top / this.report.block, size, 3);
    axisY(board, c, ...p.slab, ...board.viewY, size, 7);
    axisY(board, c, ...p.host, 0, this.hostTop / this.report.block, size, 2);
    c.save();
    c.beginPath();
    c.rect(board.left, 0, board.width - board.left - board.right, board.height);
    c.clip();
    this.drawCurve(board, c, p.curve);
    this.drawBuffers(board, c, p);
    this.drawLinks(board, c, p.links);
    this.drawStrip(board, c, p.strip);
    c.restore();
    this.drawLimits(board, c, p);
    this.drawCursor(board, c, p);
    const text = this.mode === "row" ? whole : tickSeconds;
    axisX(board, c, p.axis, text, this.mode === "row" ? "row of the step" : "predicted time at which compute is there", Math.max(3, board.width / 130));
  }

  // The bytes alive, stacked by category. Where a pixel holds many events, the fullest stands for it.
  drawCurve(board, c, [top, bottom]) {
    const space = this.view.device, scale = (bottom - top) / (this.top / this.report.block);
    const first = Math.max(0, space.eventOf(this.rowAt(board.left)) - 1);
    const points = [];
    let column = -1;
    for (let e = first; e < space.events; e++) {
      const x = board.x(this.X(space.at[e])), px = Math.floor(x);
      if (px === column) {
        const last = points[points.length - 1];
        last.after = e;
        if (space.counter[e] > space.counter[last.e]) last.e = e;
      } else {
        points.push({ x, e, after: e });
        column = px;
      }
      if (x > board.width) break;
    }
    const end = Math.min(board.x(this.X(this.view.rows)), board.width);
    const base = new Float64Array(points.length);
    const fill = (series, colour) => {
      c.fillStyle = colour;
      for (let k = 0; k < points.length; k++) {
        const point = points[k], until = k + 1 < points.length ? points[k + 1].x : end;
        const value = series[point.e], width = Math.max(until - point.x, 1);
        if (value) c.fillRect(point.x, bottom - (base[k] + value) * scale, width + 0.4, value * scale);
        base[k] += value;
      }
    };
    if (this.colouring === "role") space.names.forEach((name, k) => fill(space.series[k], palette[categoryColour(name)]));
    else fill(space.counter, palette.plain);
    c.strokeStyle = palette.ink;
    c.lineWidth = 1;
    c.beginPath();
    points.forEach((point, k) => {
      const y = bottom - space.counter[point.e] * scale, until = k + 1 < points.length ? points[k + 1].x : end;
      if (k) c.lineTo(point.x, y); else c.moveTo(point.x, y);
      c.lineTo(Math.max(until, point.x + 1), y);
    });
    c.stroke();
  }

  colourOf(i) {
    const view = this.view;
    if (this.colouring === "role") return [palette[categoryColour(view.category[i])], view.bornBy(i) === "RECOMPUTE"];
    return [palette[DECISION_COLOURS[view.decision[i]]], view.decision[i] === "recompute"];
  }

  box(i) {
    const board = this.board, view = this.view, x0 = board.x(this.X(view.first[i])), x1 = board.x(this.X(view.last[i]));
    let y0, y1;
    if (view.host[i]) {
      const [top, bottom] = this.panels.host, scale = (bottom - top) / (this.hostTop / this.report.block);
      y1 = bottom - view.offset[i] * scale; y0 = y1 - view.blocks[i] * scale;
    } else {
      y1 = board.y(view.offset[i]); y0 = board.y(view.offset[i] + view.blocks[i]);
    }
    return [x0, y0, Math.max(x1 - x0, 0.75), Math.max(y1 - y0, 0.5)];
  }

  drawBuffers(board, c, p) {
    const view = this.view, chosen = [];
    const related = this.relatives(this.picked >= 0 ? this.picked : this.over);
    for (const [host, band] of [[0, p.slab], [1, p.host]]) {
      c.save();
      c.beginPath();
      c.rect(board.left, band[0], board.width, band[1] - band[0]);
      c.clip();
      for (let i = 0; i < view.count; i++) {
        if (view.host[i] !== host) continue;
        const [x, y, w, h] = this.box(i);
        if (x > board.width || x + w < board.left || y > band[1] || y + h < band[0]) continue;
        const [colour, hatched] = this.colourOf(i);
        c.globalAlpha = this.wanted && !this.matches(i) ? 0.15 : 1;
        c.fillStyle = hatched && w > 3 && h > 3 ? hatch(c, colour) : colour;
        c.fillRect(x, y, w, h);
        if (w > 3 && h > 3) {
          c.strokeStyle = palette.panel;
          c.lineWidth = 1;
          c.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
        }
        if (w > 44 && h > 12 && !hatched) {
          c.fillStyle = inkOn(colour);
          c.textAlign = "left";
          const from = Math.max(x, board.left), room = Math.min(x + w, board.width - board.right) - from - 8;
          const text = clipped(c, view.name(i), room);
          if (text.length > 5 || text === view.name(i)) c.fillText(text, from + 4, (Math.max(y, band[0]) + Math.min(y + h, band[1])) / 2);
        }
        if (related.has(i)) chosen.push([x, y, w, h, band]);
      }
      c.globalAlpha = 1;
      c.strokeStyle = palette.ink;
      c.lineWidth = 2;
      for (const [x, y, w, h, own] of chosen) if (own === band) c.strokeRect(x, y, w, h);
      c.restore();
    }
    c.strokeStyle = palette.line;
    c.lineWidth = 1;
    for (const band of [p.curve, p.slab, p.host]) {
      c.beginPath(); c.moveTo(board.left, band[1] + 0.5); c.lineTo(board.width - board.right, band[1] + 0.5); c.stroke();
    }
  }

  // A buffer, and the other lives of the same value: its pinned copy, and what was brought back or made again.
  relatives(i) {
    if (i < 0) return new Set();
    const view = this.view, key = view.name(i).replace(/ on host$/, ""), found = new Set([i]);
    if (view.fixed[i]) return found;
    for (let k = 0; k < view.count; k++) {
      const name = view.name(k);
      if (name === key || name === key + " on host") found.add(k);
    }
    return found;
  }

  drawLinks(board, c, [top, bottom]) {
    const view = this.view;
    c.lineWidth = 1.5;
    for (let k = 0; k < view.rows; k++) {
      const way = MOVES[view.op[k]];
      if (!way || view.stream[k] === "compute") continue;
      const x = (board.x(this.X(k)) + board.x(this.X(k + 1))) / 2;
      if (x < board.left - 5 || x > board.width) continue;
      c.strokeStyle = c.fillStyle = palette[opColour(view.op[k])];
      const [from, to] = way > 0 ? [top + 3, bottom - 3] : [bottom - 3, top + 3];
      c.beginPath(); c.moveTo(x, from); c.lineTo(x, to - 4 * way); c.stroke();
      c.beginPath(); c.moveTo(x, to); c.lineTo(x - 3.5, to - 6 * way); c.lineTo(x + 3.5, to - 6 * way); c.fill();
    }
  }

  // What runs: the op of each row, as a thin band over the axis.
  drawStrip(board, c, [top, bottom]) {
    const view = this.view;
    const first = this.rowAt(board.left), last = Math.min(view.rows - 1, this.rowAt(board.width - board.right));
    for (let k = first; k <= last; k++) {
      const x = board.x(this.X(k)), w = board.x(this.X(k + 1)) - x;
      if (w <= 0) continue;
      const colour = palette[opColour(view.op[k])];
      c.fillStyle = HATCHED_OPS.has(view.op[k]) && w > 2 ? hatch(c, colour) : colour;
      c.fillRect(x, top, Math.max(w, 0.7), bottom - top);
    }
  }

  drawLimits(board, c, p) {
    const view = this.view, block = this.report.block, inCurve = (n) => p.curve[1] - n / this.top * (p.curve[1] - p.curve[0]);
    const named = (text, n) => text + " " + bytes(n), here = this.views.plan.data.reserved_bytes, budget = this.report.memory_bytes;
    const lines = [[view.data.reserved_bytes, palette.soft, named("reserved", view.data.reserved_bytes), [5, 4], "right"]];
    if (budget) lines.push([budget, palette.bad, named("budget", budget), [], "left"]);
    if (this.which === "naive") lines.push([here, palette.accent, named("this plan reserves", here), [2, 3], "right"]);
    for (const [n, colour, text, dash, side] of lines) {
      if (n > this.top) continue;
      horizontal(board, c, inCurve(n), colour, "", dash);
      const y = board.y(n / block);
      if (y < p.slab[0] - 1 || y > p.slab[1]) continue;
      const above = y < p.slab[0] + 18; // beside the title, where no buffer is covered
      horizontal(board, c, y, colour, above ? "" : text, dash, side);
      if (above) label(c, text, side === "right" ? board.width - board.right - 4 : 130, p.slab[0] - 10, colour, side);
    }
  }

  drawCursor(board, c, p) {
    const view = this.view, peak = view.data.peak_row;
    const middle = (k) => (board.x(this.X(k)) + board.x(this.X(k + 1))) / 2;
    const inside = (x) => x >= board.left - 1 && x <= board.width - board.right + 1;
    const x = middle(peak);
    if (inside(x)) {
      const y = p.curve[1] - view.data.peak_bytes / this.top * (p.curve[1] - p.curve[0]);
      c.fillStyle = palette.ink;
      c.beginPath(); c.moveTo(x, y - 1); c.lineTo(x - 5, y - 9); c.lineTo(x + 5, y - 9); c.fill();
      label(c, "peak " + bytes(view.data.peak_bytes), x + (x > board.width * 0.7 ? -10 : 10), Math.max(y - 6, 9), palette.ink, x > board.width * 0.7 ? "right" : "left");
    }
    const at = middle(this.row);
    if (!inside(at)) return;
    c.strokeStyle = palette.ink;
    c.globalAlpha = 0.55;
    c.lineWidth = 1;
    c.setLineDash([3, 3]);
    c.beginPath(); c.moveTo(at, p.curve[0]); c.lineTo(at, p.strip[1]); c.stroke();
    c.setLineDash([]);
    c.globalAlpha = 1;
  }

  // -- pointing --------------------------------------------------------------------------------------------------

  bufferAt(px, py) {
    if (!this.panels || px < this.board.left) return -1;
    const view = this.view, host = py > this.panels.links[1] ? 1 : 0;
    if (!host && (py < this.panels.slab[0] || py > this.panels.slab[1])) return -1;
    let best = -1;
    for (let i = 0; i < view.count; i++) {
      if (view.host[i] !== host) continue;
      const [x, y, w, h] = this.box(i), slack = host && h < 4 ? 2 : 0;
      if (px >= x - 0.5 && px <= x + Math.max(w, 2) && py >= y - slack && py <= y + h + slack) best = i;
    }
    return best;
  }

  at(board, px, py, event) {
    if (px < board.left || !this.panels) { tip.hide(); return; }
    this.row = this.rowAt(px);
    this.over = this.bufferAt(px, py);
    const view = this.view, lines = [`row ${whole(this.row)}: ${view.rowText(this.row)}`, `${bytes(view.device.live(this.row) * this.report.block)} alive`];
    if (this.over >= 0) {
      const i = this.over;
      lines.unshift(`${view.name(i)}  ${bytes(view.blocks[i] * this.report.block)}`, `${view.role[i]}${view.decision[i] ? ", " + view.decision[i] : ""}`);
      const reason = this.report.reasons[view.layer(i)];
      if (reason) lines.splice(2, 0, reason);
    }
    tip.show(lines.join("\n"), event);
    this.board.redraw();
    if (this.picked < 0) this.details();
  }

  leave() {
    this.over = -1;
    if (this.picked < 0) { this.row = this.view.data.peak_row; this.details(); }
    this.board.redraw();
  }

  click(board, px, py) {
    const i = this.bufferAt(px, py);
    if (px >= board.left) this.row = this.rowAt(px);
    this.pick(i === this.picked ? -1 : i);
  }

  pick(i) { this.picked = i; this.details(); this.board.redraw(); }

  dive(board, px, py) {
    const i = this.bufferAt(px, py);
    if (i < 0) { board.zoom(0.4, px); return; }
    this.picked = i;
    const room = this.view.blocks[i] * 1.5;
    if (!this.view.host[i]) board.viewY = [this.view.offset[i] - room, this.view.offset[i] + this.view.blocks[i] + room];
    board.reveal(this.X(this.view.first[i]), this.X(this.view.last[i]), 0.4);
    this.details();
  }

  key(board, event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) {
      this.row = Math.min(Math.max(this.row + step * (event.shiftKey ? 10 : 1), 0), this.view.rows - 1);
      if (this.X(this.row) < board.view[0] || this.X(this.row) > board.view[1]) board.reveal(this.X(this.row), this.X(this.row), 6);
      this.picked = -1;
      this.details();
    } else if (event.key.toLowerCase() === "p") {
      this.peak();
    } else if (event.key.toLowerCase() === "n" && this.views.naive) {
      this.viewChooser.choose(this.which === "plan" ? "naive" : "plan");
    } else if (event.key === "Escape") {
      this.pick(-1);
    } else {
      return false;
    }
    board.redraw();
    return true;
  }

  // -- words -----------------------------------------------------------------------------------------------------

  explain() {
    const { bytes: rest, events } = this.view.unexplained(), merged = this.view.data.merged;
    const box = $("unexplained");
    box.textContent = `${whole(rest)} bytes unexplained`;
    box.classList.toggle("wrong", rest !== 0);
    box.title = "The largest difference between the allocator's counter and the sum of the rectangles, and of the categories";
    $("merged").textContent = `at each of ${whole(events)} allocations and frees: counter minus rectangles.` + (merged.buffers
      ? ` ${whole(merged.buffers)} buffers of at most ${bytes(merged.byte_rows)} × rows are not drawn one by one; their bytes are counted.` : "");
  }

  details() {
    const panel = $("lifetimes-details");
    panel.replaceChildren(...(this.picked >= 0 ? this.about(this.picked) : []), ...this.composition());
  }

  about(i) {
    const view = this.view, block = this.report.block, list = el("dl");
    const add = (name, value) => { if (value) list.append(el("dt", {}, name), el("dd", {}, value)); };
    const n = view.blocks[i] * block;
    const holds = view.data.buffers.holds[i].map((code) => view.text[code]);
    add("role", view.role[i]);
    add("holds", holds.join(", then "));
    add("layer", view.layer(i));
    add("shape", view.shape(i));
    add("decision", view.decision[i]);
    add("bytes", `${bytes(n)} (${whole(n)})`);
    add("address", `${whole(view.offset[i] * block)} to ${whole((view.offset[i] + view.blocks[i]) * block)}${view.host[i] ? ", pinned" : ""}`);
    if (view.fixed[i]) {
      add("alive", "as long as the program");
    } else {
      add("alive", `rows ${whole(view.first[i])} to ${whole(view.last[i] - 1)}, ${seconds(view.reached[view.last[i]] - view.reached[view.first[i]])}`);
    }
    const parts = [el("p", { class: "name" }, view.name(i)), list];
    const reason = this.report.reasons[view.layer(i)];
    if (reason) parts.splice(1, 0, el("p", { class: "reason" }, reason));
    const rows = view.fixed[i] ? null : view.touching(i);
    if (rows && rows.length) {
      const uses = el("dl");
      const shown = rows.length > 9 ? [...rows.slice(0, 4), null, ...rows.slice(-4)] : rows;
      for (const entry of shown) {
        if (entry) uses.append(el("dt", {}, `${whole(entry[0])} ${entry[1] ? "writes" : "reads"}`), el("dd", {}, view.rowText(entry[0])));
        else uses.append(el("dt", {}, "…"), el("dd", {}, plural(rows.length - 8, "more row")));
      }
      parts.push(el("h3", {}, "Rows that touch it"), uses);
    }
    return parts;
  }

  composition() {
    const view = this.view, block = this.report.block, row = this.row, alive = view.alive(row), total = view.device.live(row) * block;
    const heading = row === view.data.peak_row ? "Alive at the peak" : "Alive now";
    const parts = [el("h3", {}, `${heading}: ${bytes(total)} in ${plural(alive.length, "buffer")}`),
      el("p", {}, `row ${whole(row)}: ${view.rowText(row)}`)];
    const event = view.device.eventOf(row);
    const byRole = this.colouring === "role";
    const shares = byRole ? view.device.names.map((name, k) => [name, event < 0 ? 0 : view.device.series[k][event] * block, categoryColour(name)])
      : this.report.decisions.map((name) => [name || "no decision", alive.filter((i) => view.decision[i] === name).reduce((sum, i) => sum + view.blocks[i] * block, 0), DECISION_COLOURS[name]]);
    parts.push(stacked(shares, total));
    const largest = alive.slice(0, 10).map((i) => [view.name(i), view.blocks[i] * block,
      byRole ? categoryColour(view.category[i]) : DECISION_COLOURS[view.decision[i]], byRole ? view.bornBy(i) === "RECOMPUTE" : view.decision[i] === "recompute"]);
    parts.push(barList(largest, largest.length ? largest[0][1] : 1));
    const rest = alive.slice(10).reduce((sum, i) => sum + view.blocks[i] * block, 0);
    if (rest) parts.push(el("p", {}, `and ${plural(alive.length - 10, "smaller buffer")}: ${bytes(rest)}`));
    return parts;
  }
}

// One bar, divided; entries are [name, bytes, colour].
function stacked(entries, total) {
  const bar = el("div", { class: "stack" });
  for (const [name, n, colour] of entries) {
    if (n) bar.append(el("i", { title: `${name}: ${bytes(n)}`, style: { width: 100 * n / total + "%", backgroundColor: `var(--${colour})` } }));
  }
  return bar;
}

// A list of bars; entries are [name, bytes, colour, hatched].
function barList(entries, most) {
  const list = el("div", { class: "bars" });
  for (const [name, n, colour, hatched] of entries) {
    list.append(el("span", { class: "label swatched", title: name }, swatch(colour, hatched), el("span", { class: "label" }, name)),
      el("div", { class: "track" }, el("i", { style: { width: 100 * n / most + "%", backgroundColor: `var(--${colour})` } })),
      el("span", { class: "value" }, bytes(n)));
  }
  return list;
}
