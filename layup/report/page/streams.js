// Streams: a Gantt chart of one steady step, the waits between its streams, and the bytes alive below.

class Streams {
  constructor(report, view) {
    this.report = report;
    this.view = view;
    const order = ["compute", "h2d", "d2h", "comm"];
    const used = [...new Set(view.stream)];
    this.lanes = [...order.filter((s) => used.includes(s)), ...used.filter((s) => !order.includes(s))];
    this.titles = { compute: "compute", h2d: "host to device", d2h: "device to host", comm: "other GPUs" };
    this.picked = -1;
    this.over = -1;
    this.showWaits = true;
    // What a step does before the one before has ended is drawn where the next step does it, one step later: pale.
    const step = view.data.step_ns;
    this.later = Float64Array.from(view.start, (start) => (start < -1 ? step : 0));
    this.start = view.start.map((start, k) => start + this.later[k]);
    this.end = view.end.map((end, k) => end + this.later[k]);
    this.findWaits();
    this.board = new Board($("streams-chart"), "Streams of one step by predicted time", this);
    this.board.left = 122;
    this.board.closest = Math.max(step / 2e5, 100);
    this.board.setFull(-0.015 * step, this.end.reduce((a, b) => Math.max(a, b), step));
    this.board.fullY = this.board.viewY = [0, 1];
    const waits = el("input", { type: "checkbox", checked: true, onchange: (event) => { this.showWaits = event.target.checked; this.board.redraw(); } });
    $("streams-controls").append(zoomButtons(this.board), el("label", {}, waits, "waits"), savePicture(this.board, "streams"));
    const ops = [...new Set(view.op)].filter((op) => op !== "HOLD");
    $("streams-legend").replaceChildren(...ops.map((op) => legendEntry(opColour(op), OP_NAMES[op] || op.toLowerCase(), HATCHED_OPS.has(op))));
    this.table();
  }

  // Waits as [row, waited row or -1, stalls]: a stream stood still if it had ended its row before, and starts at the end of the waited one.
  findWaits() {
    const view = this.view, flat = view.data.waits || [], last = {}, before = new Int32Array(view.rows).fill(-1);
    for (let k = 0; k < view.rows; k++) {
      before[k] = last[view.stream[k]] ?? -1;
      last[view.stream[k]] = k;
    }
    this.waits = [];
    for (let p = 0; p < flat.length; p += 3) {
      const [row, waited, lag] = [flat[p], flat[p + 1], flat[p + 2]];
      const free = before[row] < 0 ? -Infinity : view.end[before[row]];
      const ended = lag ? view.end[waited] - view.data.step_ns : view.end[waited];
      this.waits.push([row, waited, lag, ended, view.start[row] - free > 500 && Math.abs(view.start[row] - ended) < 2]);
    }
  }

  height() { return 30 + this.lanes.length * 62 + 130; }
  laneTop(lane) { return 24 + lane * 62; }

  draw(board, c) {
    const view = this.view, tall = 36, width = board.width - board.right;
    this.bottom = this.laneTop(this.lanes.length);
    board.bandY = [0, this.bottom];
    c.font = "600 12px " + css("sans");
    this.lanes.forEach((lane, k) => {
      const y = this.laneTop(k);
      c.fillStyle = palette.stripe;
      c.fillRect(board.left, y, width - board.left, tall);
      c.fillStyle = palette.ink;
      c.textAlign = "right";
      c.fillText(this.titles[lane] || lane, board.left - 8, y + tall / 2);
    });
    c.font = "12px " + css("sans");
    c.save();
    c.beginPath(); c.rect(board.left, 0, width - board.left, board.height); c.clip();
    const zero = board.x(0);
    const filled = new Map(); // lane -> rightmost pixel drawn, so that crowds of tiny rows stay quick
    for (let k = 0; k < view.rows; k++) {
      if (view.end[k] <= view.start[k]) continue;
      const x = board.x(this.start[k]), w = board.x(this.end[k]) - x;
      if (x > board.width || x + w < board.left) continue;
      const lane = this.lanes.indexOf(view.stream[k]), y = this.laneTop(lane), colour = palette[opColour(view.op[k])];
      if (w < 0.3 && x + w < (filled.get(lane) ?? -1)) continue;
      filled.set(lane, x + Math.max(w, 0.5));
      const hatched = HATCHED_OPS.has(view.op[k]);
      c.globalAlpha = this.later[k] ? 0.6 : 1;
      c.fillStyle = hatched && w > 3 ? hatch(c, colour) : colour;
      c.fillRect(x, y, Math.max(w, 0.5), tall);
      c.globalAlpha = 1;
      if (w > 4) { c.strokeStyle = palette.panel; c.lineWidth = 1; c.strokeRect(x + 0.5, y + 0.5, w - 1, tall - 1); }
      if (w > 40) {
        c.fillStyle = hatched ? palette.ink : inkOn(colour);
        c.textAlign = "left";
        const from = Math.max(x, board.left) + 4;
        const text = clipped(c, view.text[view.target[k]], Math.min(x + w, width) - from - 4);
        if (text.length < 6 && text !== view.text[view.target[k]]) continue;
        if (hatched && text) label(c, text, from + 2, y + tall / 2, palette.ink); else c.fillText(text, from, y + tall / 2);
      }
    }
    if (this.showWaits) this.drawWaits(board, c, tall);
    for (const k of new Set([this.over, this.picked])) {
      if (k < 0) continue;
      const x = board.x(this.start[k]);
      c.strokeStyle = palette.ink;
      c.lineWidth = 2;
      c.strokeRect(x, this.laneTop(this.lanes.indexOf(view.stream[k])), Math.max(board.x(this.end[k]) - x, 1), tall);
    }
    const [top, bottom] = [this.bottom + 2, board.height - 28];
    this.drawLive(board, c, top, bottom);
    c.restore();
    const most = Math.max(view.data.reserved_bytes, view.data.peak_bytes) * 1.06;
    axisY(board, c, top, bottom, 0, most, roundBytes, 3, true, false);
    c.font = "600 12px " + css("sans");
    c.fillStyle = palette.ink;
    c.fillText("bytes alive", board.left - 8, top - 9);
    c.font = "12px " + css("sans");
    c.strokeStyle = palette.faint;
    c.setLineDash([2, 3]);
    for (const at of [0, view.data.step_ns]) {
      const x = board.x(at);
      if (x >= board.left && x <= width + 1) { c.beginPath(); c.moveTo(x, 16); c.lineTo(x, bottom); c.stroke(); }
    }
    c.setLineDash([]);
    c.fillStyle = palette.soft;
    c.textAlign = "left";
    if (zero >= board.left && zero < width - 100) c.fillText("the step before ends", zero + 4, 12);
    axisX(board, c, board.height - 26, tickSeconds, "predicted time", Math.max(3, board.width / 150));
  }

  drawWaits(board, c, tall) {
    const view = this.view, [low, high] = board.view, crowded = this.waits.length > 3000 && high - low > (board.full[1] - board.full[0]) / 8;
    for (const stalls of [false, true]) {
      c.strokeStyle = stalls ? palette.bad : palette.soft;
      c.lineWidth = stalls ? 1.4 : 0.7;
      c.globalAlpha = stalls ? 0.9 : 0.45;
      c.beginPath();
      for (const [row, waited, lag, ended, stall] of this.waits) {
        const later = this.later[row];
        if (stall !== stalls || (crowded && !stall) || this.start[row] < low || ended + later > high) continue;
        const from = this.laneTop(this.lanes.indexOf(view.stream[waited])), to = this.laneTop(this.lanes.indexOf(view.stream[row]));
        const down = to > from;
        c.moveTo(board.x(ended + later), down ? from + tall : from);
        c.lineTo(board.x(this.start[row]), down ? to : to + tall);
      }
      c.stroke();
    }
    c.globalAlpha = 1;
  }

  drawLive(board, c, top, bottom) {
    const view = this.view, space = view.device, most = Math.max(view.data.reserved_bytes, view.data.peak_bytes) * 1.06 / this.report.block;
    const y = (blocks) => bottom - blocks / most * (bottom - top);
    c.fillStyle = palette.activation;
    c.globalAlpha = 0.45;
    c.beginPath();
    c.moveTo(board.x(view.reached[0]), bottom);
    let column = -1, highest = 0, level = 0, lastX = board.left;
    const put = (x) => { c.lineTo(lastX, y(highest)); c.lineTo(x, y(highest)); };
    lastX = board.x(view.reached[0]);
    for (let e = 0; e < space.events; e++) {
      const x = board.x(view.reached[space.at[e]]), px = Math.floor(x * 2);
      if (px !== column) { put(x); lastX = x; column = px; highest = level; }
      level = space.counter[e];
      highest = Math.max(highest, level);
    }
    const end = board.x(view.reached[view.rows]);
    put(end);
    c.lineTo(end, bottom);
    c.fill();
    c.globalAlpha = 1;
    const lines = [[view.data.reserved_bytes, palette.soft, "reserved", [5, 4]]];
    if (this.report.memory_bytes) lines.push([this.report.memory_bytes, palette.bad, "budget", []]);
    for (const [n, colour, text, dash] of lines) if (n / this.report.block < most) horizontal(board, c, y(n / this.report.block), colour, text, dash, text === "budget" ? "left" : "right");
  }

  rowAt(px, py) {
    const board = this.board, view = this.view, lane = Math.floor((py - 24) / 62);
    if (lane < 0 || lane >= this.lanes.length || py > this.laneTop(lane) + 36) return -1;
    let best = -1, distance = 3;
    for (let k = 0; k < view.rows; k++) {
      if (view.stream[k] !== this.lanes[lane] || view.end[k] <= view.start[k]) continue;
      const x0 = board.x(this.start[k]), x1 = board.x(this.end[k]);
      const away = px < x0 ? x0 - px : px > x1 ? px - x1 : 0;
      if (away < distance) { best = k; distance = away; }
      if (!distance) break;
    }
    return best;
  }

  describe(k) {
    const view = this.view, lines = [`${view.rowText(k)}`, `row ${whole(k)}, ${seconds(view.end[k] - view.start[k])}, from ${seconds(this.start[k])} to ${seconds(this.end[k])}${this.later[k] ? ", of the next step" : ""}`];
    for (const [row, waited, lag, , stalls] of this.waits) {
      if (row === k) lines.push(`${stalls ? "stood still for" : "after"} ${view.rowText(waited)}${lag ? " of the step before" : ""}`);
    }
    const reason = this.report.reasons[view.text[view.target[k]]];
    if (reason) lines.push(reason);
    return lines.join("\n");
  }

  at(board, px, py, event) {
    const k = px < board.left ? -1 : this.rowAt(px, py);
    if (k !== this.over) { this.over = k; board.redraw(); }
    if (k >= 0) tip.show(this.describe(k), event); else tip.hide();
  }

  leave() { this.over = -1; this.board.redraw(); }
  click(board, px, py, event) {
    this.picked = this.rowAt(px, py);
    if (this.picked >= 0) tip.show(this.describe(this.picked), event);
    board.redraw();
  }
  dive(board, px, py) {
    const k = this.rowAt(px, py);
    if (k < 0) board.zoom(0.4, px); else board.reveal(this.start[k], this.end[k], 1.5);
  }
  key() { return false; }

  table() {
    const view = this.view, step = view.data.step_ns;
    const head = el("tr", {}, ...["stream", "rows", "busy", "of the step", "bytes"].map((text, i) => el("th", { class: i ? "" : "text" }, text)));
    const body = el("tbody");
    for (const lane of this.lanes) {
      let busy = 0, rows = 0;
      for (let k = 0; k < view.rows; k++) if (view.stream[k] === lane && view.end[k] > view.start[k]) { busy += view.end[k] - view.start[k]; rows++; }
      body.append(el("tr", {}, el("td", { class: "text" }, this.titles[lane] || lane), el("td", {}, whole(rows)), el("td", {}, seconds(busy)),
        el("td", {}, percent(busy, step)), el("td", {}, this.report.stream_bytes[lane] ? bytes(this.report.stream_bytes[lane]) : "")));
    }
    const hidden = this.hidden();
    if (hidden) body.append(el("tr", {}, el("td", { class: "text", colspan: "5" }, hidden)));
    $("streams-table").replaceChildren(el("thead", {}, head), body);
  }

  // How much of the copying goes on while the compute stream works.
  hidden() {
    const view = this.view, compute = [];
    for (let k = 0; k < view.rows; k++) if (view.stream[k] === "compute" && view.end[k] > view.start[k]) compute.push([this.start[k], this.end[k]]);
    compute.sort((a, b) => a[0] - b[0]);
    let all = 0, covered = 0;
    for (let k = 0; k < view.rows; k++) {
      if ((view.stream[k] !== "h2d" && view.stream[k] !== "d2h") || view.end[k] <= view.start[k]) continue;
      const from = this.start[k], to = this.end[k];
      all += to - from;
      let low = 0, high = compute.length;
      while (low < high) { const middle = (low + high) >> 1; if (compute[middle][1] <= from) low = middle + 1; else high = middle; }
      for (; low < compute.length && compute[low][0] < to; low++) {
        covered += Math.min(compute[low][1], to) - Math.max(compute[low][0], from);
      }
    }
    return all ? `Copies take ${seconds(all)} of a step; ${percent(covered, all)} of that is hidden behind computation.` : "";
  }
}
