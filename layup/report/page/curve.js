// Budget curve: predicted step time of every policy over the budget.

const POLICY_STYLES = [ // colour, dash; `auto` lies under the others, in a broad line
  ["weight", []], ["gradient", []], ["input", []], ["weight-gradient", []], ["optimizer", []], ["activation", []],
  ["offload", []], ["weight", [6, 3]], ["gradient", [6, 3]], ["input", [6, 3]],
];

class Curve {
  constructor(report, view) {
    this.report = report;
    this.view = view;
    const curve = report.curve;
    if (!curve) {
      $("curve-text").textContent = "This report was written without the comparison of policies; scripts/report.py writes it, and scripts/compare.py prints it.";
      $("curve-chart").hidden = true;
      $("curve-table").parentElement.hidden = true;
      return;
    }
    const names = [...new Set(curve.rows.map((row) => row.policy))].sort((a, b) => (b === "auto") - (a === "auto"));
    this.policies = names.map((name, k) => ({
      name, style: name === "auto" ? ["faint", []] : POLICY_STYLES[k % POLICY_STYLES.length],
      points: this.points(curve.rows.filter((row) => row.policy === name && row.fits)),
    }));
    const drawn = this.policies.flatMap((policy) => policy.points);
    const here = { memory: view.data.reserved_bytes, step: view.data.step_ns };
    const budgets = curve.rows.map((row) => row.memory_bytes);
    this.minimum = curve.minimum_bytes;
    this.low = Math.min(this.minimum, here.memory, ...drawn.map((point) => point.memory)) * 0.9;
    this.high = Math.max(here.memory, ...budgets) * 1.06;
    const times = [...drawn.map((point) => point.step), here.step];
    const least = Math.min(...times), most = Math.max(...times);
    this.logarithmic = most > 4 * least;
    const [low, high] = [this.Y(least), this.Y(most)], room = (high - low) * 0.12 + Math.abs(high) * 0.02;
    this.least = this.logarithmic ? low - room : Math.max(0, low - room);
    this.most = high + room;
    $("curve-text").textContent = `The predicted time of a step over the bytes it may reserve, for every policy; a policy without a budget knob is one point, and costs the same under any larger budget. `
      + `Nothing runs below ${bytes(this.minimum)}. The ring marks this plan.` + (this.logarithmic ? " The scale of time is logarithmic." : "");
    this.board = new Board($("curve-chart"), "Predicted step time over the memory budget", this);
    this.board.left = 76;
    this.board.right = 24;
    this.board.closest = (this.high - this.low) / 1000;
    this.board.setFull(this.low, this.high);
    this.board.fullY = [this.least, this.most];
    this.board.viewY = [...this.board.fullY];
    this.nearest = null;
    $("curve-legend").replaceChildren(...this.policies.map(({ name, style, points }) => {
      const line = el("i", { style: { width: "22px", height: "0", borderTop: `3px ${style[1].length ? "dashed" : "solid"} var(--${style[0]})`, display: "inline-block" } });
      return el("span", {}, line, name + (points.length ? "" : " (fits nowhere here)"));
    }));
    this.table(curve.rows);
  }

  // One point a budget; equal plans under neighbouring budgets are one plan, which needs what it reserves.
  points(rows) {
    const found = new Map();
    for (const row of rows) {
      const memory = row.reserved_bytes, step = row.step_seconds * 1e9;
      if (!found.has(memory) || found.get(memory).step > step) found.set(memory, { memory, step, row });
    }
    return [...found.values()].sort((a, b) => a.memory - b.memory);
  }

  Y(step) { return this.logarithmic ? Math.log10(step) : step; }

  height() { return Math.max(320, Math.min(520, innerHeight - 330)); }

  draw(board, c) {
    const top = 16, bottom = board.height - 30, width = board.width - board.right;
    board.bandY = [top, bottom];
    c.textAlign = "right";
    if (this.logarithmic) this.axisLogarithmic(board, c, top, bottom);
    else axisY(board, c, top, bottom, ...board.viewY, tickSeconds, 6, false);
    c.save();
    c.beginPath(); c.rect(board.left, top - 8, width - board.left, bottom - top + 8); c.clip();
    const edge = board.x(this.minimum);
    if (edge > board.left) {
      c.fillStyle = palette.stripe;
      c.fillRect(board.left, top - 8, edge - board.left, bottom - top + 8);
      c.strokeStyle = palette.bad;
      c.lineWidth = 1.5;
      c.beginPath(); c.moveTo(edge, top - 8); c.lineTo(edge, bottom); c.stroke();
    }
    const budget = this.report.memory_bytes;
    if (budget) {
      const x = board.x(budget);
      c.strokeStyle = palette.accent;
      c.setLineDash([5, 4]);
      c.beginPath(); c.moveTo(x, top - 8); c.lineTo(x, bottom); c.stroke();
      c.setLineDash([]);
      label(c, "budget " + bytes(budget), x + 5, bottom - 12, palette.accent);
    }
    for (const { name, style, points } of this.policies) {
      c.strokeStyle = c.fillStyle = palette[style[0]];
      c.lineWidth = name === "auto" ? 5 : 2;
      c.setLineDash(style[1]);
      c.beginPath();
      points.forEach((point, k) => {
        const x = board.x(point.memory), y = board.y(this.Y(point.step));
        if (k) c.lineTo(x, board.y(this.Y(points[k - 1].step))); else c.moveTo(x, y);
        c.lineTo(x, y);
      });
      if (points.length) c.lineTo(board.x(this.high), board.y(this.Y(points[points.length - 1].step)));
      c.stroke();
      c.setLineDash([]);
    }
    this.names(board, c);
    for (const { name, style, points } of this.policies) {
      c.fillStyle = palette[style[0]];
      for (const point of points) { c.beginPath(); c.arc(board.x(point.memory), board.y(this.Y(point.step)), name === "auto" ? 6 : 4, 0, 7); c.fill(); }
    }
    c.strokeStyle = palette.ink;
    c.lineWidth = 2;
    c.beginPath(); c.arc(board.x(this.view.data.reserved_bytes), board.y(this.Y(this.view.data.step_ns)), 9, 0, 7); c.stroke();
    c.restore();
    if (edge > board.left - 2) label(c, "minimum " + bytes(this.minimum), edge + 5, top + 4, palette.bad);
    c.textAlign = "center";
    for (const tick of ticks(board.view[0], board.view[1], Math.max(3, board.width / 140), true)) {
      c.fillStyle = palette.line;
      c.fillRect(Math.round(board.x(tick)), bottom, 1, 5);
      c.fillStyle = palette.soft;
      c.textAlign = "center";
      if (board.x(tick) < width - 175) c.fillText(roundBytes(tick), board.x(tick), bottom + 15);
    }
    c.textAlign = "right";
    c.fillStyle = palette.soft;
    c.fillText("reserved device bytes", width, bottom + 15);
  }

  axisLogarithmic(board, c, top, bottom) {
    c.textAlign = "right";
    for (let power = Math.floor(board.viewY[0]); power <= board.viewY[1]; power++) {
      for (const digit of [1, 2, 5]) {
        const y = board.y(power + Math.log10(digit));
        if (y < top || y > bottom) continue;
        c.fillStyle = palette.grid;
        c.fillRect(board.left, Math.round(y), board.width - board.left - board.right, 1);
        c.fillStyle = palette.soft;
        c.fillText(tickSeconds(digit * 10 ** power), board.left - 7, y);
      }
    }
  }

  // The name of each policy beside its first point, above or below its line, wherever no other name is.
  names(board, c) {
    const taken = [];
    for (const { name, style, points } of [...this.policies].reverse()) {
      if (!points.length) continue;
      const x = Math.max(board.x(points[0].memory), board.left) + 9, width = c.measureText(name).width;
      for (const shift of [-11, 12]) {
        const y = board.y(this.Y(points[0].step)) + shift;
        if (taken.some((box) => Math.abs(box.y - y) < 15 && x < box.x + box.width + 6 && box.x < x + width + 6)) continue;
        label(c, name, x, y, palette[style[0] === "faint" ? "soft" : style[0]]);
        taken.push({ x, y, width });
        break;
      }
    }
  }

  at(board, px, py, event) {
    let best = null, distance = 22;
    for (const { name, points } of this.policies) {
      for (const point of points) {
        const away = Math.hypot(board.x(point.memory) - px, board.y(this.Y(point.step)) - py);
        if (away < distance) { distance = away; best = [name, point]; }
      }
    }
    if (!best) { tip.hide(); return; }
    const [name, { row }] = best;
    tip.show(`${name}\nreserves ${bytes(row.reserved_bytes)}, peak ${bytes(row.peak_bytes)}\npinned host ${bytes(row.host_bytes)}\nstep ${seconds(row.step_seconds * 1e9)}`, event);
  }

  leave() {}
  click(board, px, py, event) { this.at(board, px, py, event); }
  dive(board, px) { board.zoom(0.5, px); }
  key() { return false; }

  table(rows) {
    const budgets = [...new Set(rows.map((row) => row.memory_bytes))].sort((a, b) => b - a);
    const head = el("tr", {}, el("th", { class: "text" }, "step time under a budget of"), ...budgets.map((budget) => el("th", {}, bytes(budget))));
    const body = el("tbody", {}, ...this.policies.map(({ name }) => el("tr", {}, el("td", { class: "text" }, name), ...budgets.map((budget) => {
      const row = rows.find((candidate) => candidate.policy === name && candidate.memory_bytes === budget);
      return row && row.fits ? el("td", {}, seconds(row.step_seconds * 1e9)) : el("td", { class: "none" }, "does not fit");
    }))));
    $("curve-table").replaceChildren(el("thead", {}, head), body);
  }
}
