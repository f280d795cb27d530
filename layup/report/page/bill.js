// Plan and bill: the waterfall, the residents at the peak, and a table of all layers.

const MOST_ROWS = 250;

function drawWaterfall(report) {
  const stages = report.waterfall, box = $("waterfall");
  if (!stages.length) {
    box.replaceChildren(el("p", { class: "notice" }, "This report was written without the waterfall; scripts/report.py writes it."));
    return;
  }
  const most = Math.max(...stages.map((stage) => stage.reserved_bytes));
  const grid = el("div", { class: "fall" });
  for (const [text, kind] of [["technique", ""], ["reserved bytes", "wide"], ["", "number"], ["saves", "number"], ["peak", "number wide"], ["step", "number wide"], ["costs", "number wide"]]) {
    grid.append(el("span", { class: "head " + kind }, text));
  }
  let before = null;
  for (const stage of stages) {
    const kept = before ? Math.min(stage.reserved_bytes, before.reserved_bytes) : stage.reserved_bytes;
    const track = el("div", { class: "track" });
    if (stage.used) {
      track.append(el("i", { style: { width: 100 * kept / most + "%", backgroundColor: "var(--activation)" } }));
      if (before && before.reserved_bytes !== stage.reserved_bytes) {
        const change = Math.abs(before.reserved_bytes - stage.reserved_bytes);
        track.append(el("i", { class: before.reserved_bytes > stage.reserved_bytes ? "saved" : "lost",
          style: { left: 100 * kept / most + "%", width: 100 * change / most + "%" } }));
      }
    }
    const saved = before ? before.reserved_bytes - stage.reserved_bytes : null;
    const cost = before ? (stage.step_ns - before.step_ns) : null;
    const dim = stage.used ? "" : " unused";
    grid.append(
      el("span", { class: dim, title: stage.what }, (before ? "+ " : "") + stage.name),
      track,
      el("span", { class: "number" + dim }, stage.used ? bytes(stage.reserved_bytes) : "not used"),
      el("span", { class: "number" + dim }, stage.used && before ? bytes(saved) : ""),
      el("span", { class: "number wide" + dim }, stage.used ? bytes(stage.peak_bytes) : ""),
      el("span", { class: "number wide" + dim }, stage.used ? seconds(stage.step_ns) : ""),
      el("span", { class: "number wide" + dim }, stage.used && before ? (cost === 0 ? "0" : (cost > 0 ? "+" : "−") + seconds(Math.abs(cost))) : ""),
    );
    if (stage.used) before = stage;
  }
  box.replaceChildren(grid);
}

function drawResidents(report, view) {
  const peak = view.data.peak_row, alive = view.alive(peak), total = view.data.peak_bytes;
  $("peak-text").textContent = `${bytes(total)} (${whole(total)} bytes) in ${plural(alive.length, "buffer")} while row ${whole(peak)} runs: ${view.rowText(peak)}. `
    + `The slab reserves ${bytes(view.data.reserved_bytes)}${view.data.reserved_bytes > total ? `, ${bytes(view.data.reserved_bytes - total)} more: gaps between buffers, and what evaluation and other schedules need` : ""}.`;
  const event = view.device.eventOf(peak);
  const roles = view.device.names.map((name, k) => [name, view.device.series[k][event] * report.block, categoryColour(name)]).sort((a, b) => b[1] - a[1]);
  $("peak-roles").replaceChildren(stacked(roles, total), el("div", { class: "legend" },
    ...roles.filter(([, n]) => n).map(([name, n, colour]) => legendEntry(colour, `${name} ${bytes(n)}`))));
  const largest = alive.slice(0, 12).map((i) => [view.name(i), view.blocks[i] * report.block, categoryColour(view.category[i]), view.bornBy(i) === "RECOMPUTE"]);
  const rest = alive.slice(12).reduce((sum, i) => sum + view.blocks[i] * report.block, 0);
  $("residents").replaceChildren(barList(largest, largest.length ? largest[0][1] : 1),
    ...(rest ? [el("p", {}, `and ${plural(alive.length - 12, "smaller buffer")}: ${bytes(rest)}`)] : []));
}

class LayerTable {
  constructor(report) {
    this.report = report;
    const b = report.bill, text = (code) => report.strings[code];
    this.rows = b.name.map((_, i) => ({
      order: i, name: text(b.name[i]), kind: text(b.kind[i]), decision: text(b.decision[i]), decided_by: text(b.decided_by[i]), reason: text(b.reason[i]),
      stored: b.stored_bytes[i], moved: b.moved_bytes[i], workspace: b.workspace_bytes[i], forward: b.forward_ns[i],
      backward: b.backward_ns[i], recompute: b.recompute_ns[i], copies: b.copy_ns[i],
    }));
    this.columns = [
      ["layer", "name", "text"], ["decision", "decision", "text"], ["stores", "stored", bytes], ["to host", "moved", bytes],
      ["scratch", "workspace", bytes], ["forward", "forward", seconds], ["backward", "backward", seconds], ["recompute", "recompute", seconds],
      ["copies", "copies", seconds],
    ];
    if (this.rows.some((row) => row.reason)) this.columns.push(["why", "reason", "why"]);
    this.sorted = ["order", 1];
    this.only = "all";
    this.wanted = "";
    this.all = false;
    const counts = {};
    for (const row of this.rows) counts[row.decision] = (counts[row.decision] || 0) + 1;
    const choices = [["all", `all ${whole(this.rows.length)}`], ...Object.entries(counts).map(([name, n]) => [name, `${name} ${whole(n)}`])];
    $("bill-controls").append(
      chooser("layers", choices, "all", (key) => { this.only = key; this.draw(); }),
      el("input", { type: "search", placeholder: "find a layer", "aria-label": "find a layer", oninput: (event) => { this.wanted = event.target.value.toLowerCase(); this.draw(); } }),
    );
    const deciding = (what) => this.rows.filter((row) => row.decision === what && row.decided_by === row.name).length;
    $("bill-decisions").textContent = `The plan offloads ${plural(deciding("offload"), "layer")} and recomputes ${whole(deciding("recompute"))}; `
      + "a layer that another overwrites in place, as ReLU does batch norm, goes with it and is listed, too.";
    this.draw();
  }

  draw() {
    const [key, way] = this.sorted;
    const rows = this.rows.filter((row) => (this.only === "all" || row.decision === this.only) && (row.name + row.kind).toLowerCase().includes(this.wanted));
    rows.sort((a, b) => way * (typeof a[key] === "string" ? a[key].localeCompare(b[key]) : a[key] - b[key]) || a.order - b.order);
    const shown = this.all ? rows : rows.slice(0, MOST_ROWS);
    const head = el("tr", {}, ...this.columns.map(([title, name, format]) => el("th",
      { class: typeof format === "string" ? "text" : "", "aria-sort": key === name ? (way > 0 ? "ascending" : "descending") : null },
      el("button", { type: "button", onclick: () => this.sort(name, format) }, title + (key === name ? (way > 0 ? " ↑" : " ↓") : "")))));
    const body = el("tbody", {}, ...shown.map((row) => el("tr", {}, ...this.columns.map(([, name, format]) => this.cell(row, name, format)))));
    $("layers").replaceChildren(el("thead", {}, head), body);
    const more = $("layers-more");
    more.replaceChildren();
    if (shown.length < rows.length) {
      more.append(`The first ${whole(shown.length)} of ${whole(rows.length)} layers. `, el("button", { type: "button", onclick: () => { this.all = true; this.draw(); } }, "Show all"));
    }
  }

  cell(row, name, format) {
    if (name === "decision") {
      const note = row.decided_by === row.name ? null : `governed by ${row.decided_by}, which overwrites it in place`;
      return el("td", { class: "text", title: note }, el("span", { class: "swatched" }, swatch(DECISION_COLOURS[row.decision], row.decision === "recompute"), row.decision));
    }
    if (format === "text") return el("td", { class: "text" }, row[name], el("small", {}, " " + row.kind));
    if (format === "why") return el("td", { class: "text why" }, row[name]);
    return el("td", { class: row[name] ? "" : "none" }, row[name] ? format(row[name]) : "0");
  }

  sort(name, format) {
    const first = typeof format === "string" ? 1 : -1; // numbers: the largest first; a second click turns it round
    if (this.sorted[0] !== name) this.sorted = [name, first];
    else if (this.sorted[1] === first) this.sorted = [name, -first];
    else this.sorted = ["order", 1];
    this.draw();
  }
}
