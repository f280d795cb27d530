// Ring: the rows of all ranks on `comm`, step by step, and what `compute` does meanwhile.

class Ring {
  constructor(report) {
    this.data = report.ring;
    this.svg = $("ring-figure");
    this.mode = this.data.strategy === "ring" ? "ring" : "ring_delayed";
    this.at = 0;
    this.timer = null;
    const n = this.data.ranks;
    $("ring-text").textContent = `${n} ranks, each with the gradients of its own samples, in ${n} chunks. In a ring step every rank sends one chunk to the next. ${plural(n - 1, "step sums", "steps sum")} each chunk up `
      + `at its owner, which alone updates these weights; ${n - 1} more ${n > 2 ? "carry" : "carries"} them to all. Numbers are examples, steps those of the engine's schedule.`;
    this.slider = el("input", { type: "range", min: 0, max: this.frames.length - 1, value: 0, "aria-label": "ring step", oninput: () => this.show(Number(this.slider.value)) });
    this.back = el("button", { type: "button", id: "ring-back", onclick: () => this.show(this.at - 1) }, "← Back");
    this.next = el("button", { type: "button", id: "ring-next", onclick: () => this.show(this.at + 1) }, "Next →");
    this.play = el("button", { type: "button", id: "ring-play", onclick: () => this.toggle() }, "Play");
    $("ring-controls").append(
      chooser("strategy", [["ring_delayed", "ring_delayed"], ["ring", "ring"]], this.mode, (key) => { this.mode = key; this.show(this.at); }),
      this.back, this.next, this.play, this.slider);
    $("ring").addEventListener("keydown", (event) => {
      const to = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0, End: this.frames.length - 1 }[event.key];
      if (to === undefined || event.target === this.slider) return;
      this.show(to);
      event.preventDefault();
    });
    $("ring").tabIndex = -1;
    $("ring-legend").append(
      this.entry("color-mix(in srgb, var(--gradient) 45%, var(--panel))", "a partial sum, and whose: 0+3 are ranks 0 and 3"),
      this.entry("var(--weight-gradient)", "the sum over all ranks"), this.entry("var(--weight)", "new weights"),
      this.entry("var(--stripe)", "weights of a step before"), el("span", {}, "thick frame: what the rank owns; arrows: what has just travelled"));
    $("ring-net").textContent = this.net(this.data.net);
    this.show(0);
  }

  get frames() { return this.data.frames[this.mode]; }
  get delayed() { return this.mode === "ring_delayed"; }

  entry(colour, text) { return el("span", {}, el("i", { class: "swatch", style: { background: colour } }), text); }

  net(net) {
    const drawn = net.ranks > this.data.ranks ? ` (${this.data.ranks} are drawn)` : "";
    const hidden = net.exposed_ns === null ? "" : net.exposed_ns ? ` Of its own exchange ${seconds(net.exposed_ns)} a step are predicted not to hide behind computation.`
      : " Its own exchange is predicted to hide behind computation altogether.";
    return `This net on ${net.ranks} ranks${drawn}: ${bytes(net.parameter_bytes)} of parameters; a rank sends ${bytes(net.sent_bytes)} a step in ${2 * (net.ranks - 1)} ring steps `
      + `of ${seconds(net.hop_ns)} by this profile's links, ${seconds(net.ring_ns)} together, beside a step of ${seconds(net.step_ns)}.${hidden}`;
  }

  toggle() {
    if (this.timer !== null) { clearInterval(this.timer); this.timer = null; } else {
      if (this.at === this.frames.length - 1) this.show(0);
      this.timer = setInterval(() => { this.show(this.at + 1); if (this.at === this.frames.length - 1) this.toggle(); }, 1400);
    }
    this.play.textContent = this.timer === null ? "Play" : "Pause";
  }

  show(at) {
    this.at = Math.max(0, Math.min(at, this.frames.length - 1));
    this.slider.value = this.at;
    this.back.disabled = this.at === 0;
    this.next.disabled = this.at === this.frames.length - 1;
    this.draw(this.frames[this.at]);
  }

  caption(frame) {
    const n = this.data.ranks, late = this.delayed, g = late ? "g(t−1)" : "g(t)";
    const step = frame.phase === "gather" ? this.at - n : this.at; // frames: start, n - 1 steps, update, n - 1 steps, done
    if (frame.phase === "start") {
      return late ? ["Step t begins.", ` While compute makes the gradients g(t) with the weights W(t), comm exchanges those of the step before, g(t−1): each rank still has its own, divided by the samples of all, so that their sum is the mean.`]
        : ["Backward is done.", " Each rank has the gradients g(t) of its own samples, divided by the samples of all, so that their sum is the mean. Nothing is computed until the exchange is over."];
    }
    if (frame.phase === "reduce") {
      const k = frame.sends[0], from = (n - 1), got = frame.sends[from];
      return [`Reduce-scatter, ring step ${step} of ${n - 1}.`, ` Rank 0 sends chunk ${k} to rank 1 and adds chunk ${got}, which comes from rank ${from}: now ${this.value(frame.sums[0][got])}. All others do the same with other chunks.`
        + (step === n - 1 ? ` Each rank now has the sum of one chunk, the one it owns.` : "")];
    }
    if (frame.phase === "update") {
      const old = this.data.weights[0], sum = frame.sums[0][0];
      return ["Update.", ` Each rank updates the chunk it owns, and no other: rank 0 computes ${this.value(old)} − ${this.data.rate} × ${this.value(sum)} = ${this.value(frame.weights[0][0])}`
        + (late ? ", and writes it into the other weights: W(t) is still being read." : ", in place.") + " Only the owner has the optimizer's state for its chunk."];
    }
    if (frame.phase === "gather") {
      return [`All-gather, ring step ${step} of ${n - 1}.`, ` Rank 0 sends chunk ${frame.sends[0]} of the new weights to rank 1 and takes chunk ${frame.sends[n - 1]} from rank ${n - 1}. Nothing is added any more.`];
    }
    return late ? ["Step t ends, and the buffers change places.", ` W(t+1) = W(t) − ${this.data.rate} · mean g(t−1) is complete, the same on all ranks: the next step computes with it, and g(t), now complete, goes round the ring. Every gradient is one step late, never more. ${g} may be overwritten.`]
      : ["The next step begins", ` with weights that are the same on all ranks. All ${2 * (n - 1)} ring steps have kept compute waiting; ring_delayed hides them, for one step of delay.`];
  }

  value(number) { return String(Math.round(number * 1e4) / 1e4).replace("-", "−"); }

  draw(frame) {
    const n = this.data.ranks, late = this.delayed, total = this.frames.length - 1;
    const caption = this.caption(frame);
    $("ring-caption").replaceChildren(el("b", {}, caption[0]), caption[1]);
    const cell = { w: n > 5 ? 92 : 124, h: 25 }, gap = n > 5 ? 66 : 96, left = 200, column = cell.w + gap;
    const width = left + n * column - 10, x = (rank) => left + rank * column;
    const top = 34, second = top + n * cell.h + 46, third = second + n * cell.h + 56, height = third + (late ? 74 : 26);
    const out = [], make = (tag, attributes, text) => {
      const node = document.createElementNS(this.svg.namespaceURI, tag);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      if (text !== undefined) node.textContent = text;
      out.push(node);
      return node;
    };
    const title = (y, text, note) => {
      make("text", { x: 14, y, class: "title" }, text);
      note.forEach((line, k) => make("text", { x: 14, y: y + 20 + 17 * k, class: "soft" }, line));
    };
    for (let rank = 0; rank < n; rank++) make("text", { x: x(rank) + cell.w / 2, y: 14, class: "title", "text-anchor": "middle" }, `rank ${rank}`);
    title(top + 12, late ? "g(t−1)" : "g(t)", ["gradients,", "summed up"]);
    title(second + 12, late ? "W(t+1)" : "W", late ? ["the other", "weights"] : ["weights,", "in place"]);

    const box = (px, py, w, h, kinds, text, ink, share) => {
      const node = make("rect", { x: px, y: py, width: w, height: h, rx: 3, class: "cell " + kinds });
      if (share) node.style.setProperty("--share", share + "%");
      make("text", { x: px + w * (share ? 0.3 : 0.5), y: py + h / 2, "text-anchor": "middle", class: ink }, text);
    };
    for (let rank = 0; rank < n; rank++) {
      const before = (rank + n - 1) % n;
      for (let k = 0; k < n; k++) {
        const members = [...Array(n).keys()].filter((r) => frame.from[rank][k] >> r & 1), own = k === rank ? " own" : "";
        const arrivedG = frame.moves === "gradients" && frame.sends[before] === k ? " arrived" : "";
        const whole = members.length === n;
        box(x(rank), top + k * cell.h, cell.w, cell.h - 3, (whole ? "whole" : "partial") + (whole || !own ? own : "") + arrivedG, this.value(frame.sums[rank][k]), whole ? "on" : "", 12 + 60 * (members.length - 1) / n);
        const who = whole ? "sum" : n > 5 && members.length > 2 ? `${members.length} of ${n}` : members.join("+");
        make("text", { x: x(rank) + cell.w - 8, y: top + (k + 0.45) * cell.h, class: whole ? "on" : "soft", "text-anchor": "end", style: "font-size:11px" }, who);
        const arrivedW = frame.moves === "weights" && frame.sends[before] === k ? " arrived" : "";
        const fresh = frame.new[rank][k];
        const shown = late && !fresh ? "W(t−1)" : this.value(frame.weights[rank][k]);
        box(x(rank), second + k * cell.h, cell.w, cell.h - 3, (fresh ? "new" : "stale") + own + arrivedW, shown, fresh ? "on" : "stale");
        if (rank === 0) {
          make("text", { x: x(0) - 30, y: top + (k + 0.45) * cell.h, class: "soft", "text-anchor": "end" }, `chunk ${k}`);
          make("text", { x: x(0) - 30, y: second + (k + 0.45) * cell.h, class: "soft", "text-anchor": "end" }, `chunk ${k}`);
        }
      }
      if (frame.phase === "update") {
        this.arrow(make, [[x(rank) + cell.w / 2, top + n * cell.h], [x(rank) + cell.w / 2, second - 5]]);
        if (rank === 0) make("text", { x: x(0) + cell.w / 2 + 10, y: (top + n * cell.h + second) / 2, class: "soft" }, `× −${this.data.rate}, added`);
      }
    }
    if (frame.moves) {
      const base = frame.moves === "gradients" ? top : second;
      frame.sends.forEach((k, rank) => {
        if (k === null) return;
        const y = base + (k + 0.45) * cell.h, from = x(rank) + cell.w + 4;
        if (rank < n - 1) this.arrow(make, [[from, y], [x(rank + 1) - 5, y]]);
        else { // round the back, to rank 0
          const low = base + n * cell.h + 14;
          this.arrow(make, [[from, y], [from + 14, y], [from + 14, low], [x(0) - 20, low], [x(0) - 20, y], [x(0) - 16, y]], x(0) - 5);
        }
      });
    }
    this.compute(make, title, frame, { x, third, cell, n, late, total, gap });
    this.svg.style.maxWidth = `${Math.round(1.2 * width)}px`;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...out);
  }

  // What stream `compute` does meanwhile: reads one of the two weights, writes one of the two gradients.
  compute(make, title, frame, { x, third, cell, n, late, total, gap }) {
    make("rect", { x: 0, y: third - 22, width: x(n) - 10, height: late ? 100 : 52, class: "band" });
    title(third, "compute", late ? ["meanwhile"] : ["waits"]);
    const w = (cell.w + gap - 22) / n;
    for (let rank = 0; rank < n; rank++) {
      if (!late) { make("text", { x: x(rank), y: third, class: "soft" }, frame.phase === "start" ? "made g(t) with W" : frame.phase === "done" ? "goes on" : "waits"); continue; }
      make("text", { x: x(rank), y: third - 9, class: "soft" }, "reads W(t)");
      make("text", { x: x(rank), y: third + 32, class: "soft" }, this.at === total ? "has made g(t)" : "makes g(t)");
      const ready = Math.floor(n * this.at / total);
      for (let k = 0; k < n; k++) {
        const px = x(rank) + k * w, made = k >= n - ready; // backward makes the last layers' gradients first
        make("rect", { x: px, y: third, width: w - 2, height: 22, rx: 3, class: "cell new" });
        if (w > 26) make("text", { x: px + w / 2 - 1, y: third + 11, "text-anchor": "middle", class: "on", style: "font-size:11px" }, this.value(this.data.weights[k]));
        make("rect", { x: px, y: third + 41, width: w - 2, height: 22, rx: 3, class: made ? "cell partial" : "cell" }).style.setProperty("--share", "40%");
        if (made && w > 26) make("text", { x: px + w / 2 - 1, y: third + 52, "text-anchor": "middle", style: "font-size:11px" }, this.value(this.data.made[rank][k]));
      }
    }
  }

  arrow(make, points, ending) {
    const [px, py] = points[points.length - 1], to = ending ?? px;
    const path = points.map(([a, b], k) => (k ? "L" : "M") + a + " " + b).join(" ") + (ending === undefined ? "" : ` L ${to} ${py}`);
    make("path", { d: path, class: "arrow" });
    const down = points.length === 2 && points[0][0] === px && points[0][1] !== py;
    make("path", { d: down ? `M ${px - 6} ${py - 8} L ${px} ${py + 2} L ${px + 6} ${py - 8} Z` : `M ${to - 8} ${py - 6} L ${to + 2} ${py} L ${to - 8} ${py + 6} Z`, class: "tip" });
  }
}
