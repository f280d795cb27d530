// A view (one schedule) with its columns as typed arrays, and the check that every byte of the counter is a rectangle's.

class View {
  constructor(data, report) {
    this.data = data;
    this.text = report.strings;
    this.block = report.block;
    const { rows, buffers } = data;
    this.rows = rows.op.length;
    this.op = rows.op.map((code) => report.ops[code]);
    this.target = rows.target;
    this.stream = rows.stream.map((code) => report.strings[code]);
    this.start = Float64Array.from(rows.start);
    this.end = Float64Array.from(rows.start, (start, i) => start + rows.duration[i]);
    this.count = buffers.name.length;
    this.blocks = Float64Array.from(buffers.blocks);
    this.offset = Float64Array.from(buffers.offset);
    this.host = Uint8Array.from(buffers.host);
    this.fixed = Uint8Array.from(buffers.persistent);
    this.role = buffers.role.map((code) => report.roles[code]);
    this.category = this.role.map((role) => report.categories[role]);
    this.decision = buffers.decision.map((code) => report.decisions[code]);
    this.device = new Space(data.spaces.device, this, 0);
    this.pinned = new Space(data.spaces.pinned, this, 1);
    this.first = new Int32Array(this.count); // rows between which a buffer is alive: first <= row < last
    this.last = new Int32Array(this.count);
    for (let i = 0; i < this.count; i++) {
      const space = this.host[i] ? this.pinned : this.device;
      this.first[i] = this.fixed[i] ? 0 : space.at[buffers.born[i]];
      this.last[i] = this.fixed[i] || buffers.died[i] >= space.events ? this.rows : space.at[buffers.died[i]];
    }
    this.reached = this.computeReaches();
    this.byRow = null;
  }

  // When the compute stream reaches each row, and, at the end, when the last row of compute has ended.
  computeReaches() {
    const reached = new Float64Array(this.rows + 1);
    let at = 0;
    for (let i = 0; i < this.rows; i++) if (this.stream[i] === "compute") at = Math.max(at, this.end[i]);
    reached[this.rows] = at;
    for (let i = this.rows - 1; i >= 0; i--) {
      if (this.stream[i] === "compute") at = this.start[i];
      reached[i] = at;
    }
    return reached;
  }

  name(i) { return this.text[this.data.buffers.name[i]]; }
  layer(i) { return this.text[this.data.buffers.layer[i]]; }
  shape(i) { return this.text[this.data.buffers.shape[i]]; }
  rowText(k) { return (OP_NAMES[this.op[k]] || this.op[k].toLowerCase()) + " " + this.text[this.target[k]]; }
  bornBy(i) { return this.fixed[i] || this.first[i] >= this.rows ? "" : this.op[this.first[i]]; }

  // Rows that touch a buffer: [row, writes it]. Null where the report leaves that out.
  touching(i) {
    const touches = this.data.touches;
    if (!touches) return null;
    const found = [];
    for (let k = this.first[i]; k < this.last[i]; k++) {
      const writes = touches.writes[k].includes(i);
      if (writes || touches.reads[k].includes(i)) found.push([k, writes]);
    }
    return found;
  }

  // Buffers alive while a row runs, largest first.
  alive(k, host = 0) {
    const found = [];
    for (let i = 0; i < this.count; i++) {
      if (this.host[i] === host && this.first[i] <= k && k < this.last[i]) found.push(i);
    }
    return found.sort((a, b) => this.blocks[b] - this.blocks[a] || a - b);
  }

  // Bytes by which counter and rectangles differ most, over all events of both spaces; and how many events those are.
  unexplained() {
    return { bytes: Math.max(this.device.unexplained, this.pinned.unexplained) * this.block,
      events: this.device.events + this.pinned.events };
  }
}

class Space {
  constructor(data, view, host) {
    this.at = Int32Array.from(data.at);
    this.counter = Float64Array.from(data.counter);
    this.events = data.at.length;
    this.names = Object.keys(data.categories);
    this.series = this.names.map((name) => this.spread(data.categories[name]));
    this.merged = this.spread(data.merged);
    this.unexplained = this.check(view, host);
  }

  // `event, value` pairs as one value per event.
  spread(pairs) {
    const values = new Float64Array(this.events);
    for (let p = 0; p < pairs.length; p += 2) {
      const until = p + 2 < pairs.length ? pairs[p + 2] : this.events;
      values.fill(pairs[p + 1], pairs[p], until);
    }
    return values;
  }

  // The largest difference, at any event, of the allocator's counter from the sum of the rectangles, and from the sum of
  // the categories, in blocks.
  check(view, host) {
    const { born, died } = view.data.buffers;
    const change = new Float64Array(this.events + 1);
    for (let i = 0; i < view.count; i++) {
      if (view.host[i] !== host) continue;
      change[born[i]] += view.blocks[i];
      change[Math.min(died[i], this.events)] -= view.blocks[i];
    }
    let sum = 0, worst = 0;
    for (let e = 0; e < this.events; e++) {
      sum += change[e];
      let categories = 0;
      for (const series of this.series) categories += series[e];
      worst = Math.max(worst, Math.abs(this.counter[e] - sum - this.merged[e]), Math.abs(this.counter[e] - categories));
    }
    return worst;
  }

  // The last event that comes before a row has run: what is alive while it runs.
  eventOf(row) {
    let low = 0, high = this.events;
    while (low < high) { const middle = (low + high) >> 1; if (this.at[middle] <= row) low = middle + 1; else high = middle; }
    return low - 1;
  }

  live(row) { const event = this.eventOf(row); return event < 0 ? 0 : this.counter[event]; }
}
