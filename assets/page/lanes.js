/* The lanes: draft batches and verifications on one clock, drawn on a canvas, with an overview and a table. */
(() => {
  "use strict";
  const { make, fixed, reduced, lanesKey, roundsTable, drawOverview, describeRound, verdict, tipContent } = window.duochat;

  const ROWS = { cpu: 4, gpu: 40, strip: 78, axis: 146, height: 164, lane: 30, stripHeight: 64, title: 14, gutter: 50 };

  class Lanes {
    constructor(picture) {
      this.picture = picture;
      this.rooms = new Map();
      this.canvas = make("canvas.dp-canvas", {
        tabindex: "0",
        role: "img",
        "aria-label":
          "Time line: batches of the draft above, steps of the target below. Left and right move, plus and minus zoom, End follows. The table below has the same data.",
        onwheel: (e) => this.wheel(e),
        onpointerdown: (e) => this.press(e),
        onpointermove: (e) => this.hover(e),
        onpointerleave: () => this.leave(),
        onkeydown: (e) => this.key(e),
      });
      this.overview = make("canvas.dp-overview", {
        "aria-hidden": "true",
        onpointerdown: (e) => this.jump(e),
        onpointermove: (e) => e.buttons && this.jump(e),
      });
      this.live = make("button.dp-button", {
        type: "button",
        text: "back to the newest",
        hidden: true,
        onclick: () => this.follow(),
      });
      this.table = make(
        "details.dp-table",
        { ontoggle: () => this.drawTable() },
        make("summary", { text: "The same as a table" }),
        make("div"),
      );
      this.node = make(
        "figure.dp-lanes",
        {},
        make("figcaption", {}, make("b", {}, "Two lanes, one clock"), (this.devices = make("small")), this.live),
        lanesKey(() => this.picture.figures && this.picture.explain("drafted")),
        this.canvas,
        this.overview,
        this.table,
      );
      new ResizeObserver(([entry]) => {
        this.width = entry.contentRect.width;
        this.refresh();
      }).observe(this.canvas);
      this.follow();
    }

    describe({ draft, target }) {
      this.devices.textContent = draft && target ? `Draft on ${draft}. Target on ${target}.` : "";
    }

    follow() {
      this.following = true;
      this.zoomed = this.clock !== undefined;
      if (this.given) [this.span, this.right] = [this.given, this.clock];
      this.live.hidden = true;
      this.picture.wake?.();
    }

    unfollow() {
      this.following = false;
      this.live.hidden = false;
    }

    /** Seconds in view until the viewer zooms: as many rounds as have room for their numbers. */
    autoSpan() {
      const { rounds } = this.picture.answer;
      const last = rounds.slice(-24);
      if (!last.length) return 1;
      const length = last[last.length - 1].at[1] - last[0].at[0];
      return Math.min(
        Math.max(0.02, Math.min(((this.width / 75) * length) / last.length, this.picture.answer.end)),
        60,
      );
    }

    /** Give both canvases the pixels of their size. */
    fit() {
      const ratio = devicePixelRatio || 1;
      for (const [canvas, height] of [
        [this.canvas, ROWS.height],
        [this.overview, 30],
      ]) {
        const width = Math.round(this.width * ratio);
        if (canvas.width !== width || canvas.height !== height * ratio)
          [canvas.width, canvas.height] = [width, height * ratio];
      }
    }

    /** Draw the window; true while it still moves. */
    draw(now) {
      const { width } = this;
      if (!width) return false;
      this.fit();
      const { answer } = this.picture;
      const settled = this.advance(answer);
      this.view = { width, start: this.right - this.span, scale: (width - ROWS.gutter - 6) / this.span };
      const pen = this.pen(this.canvas);
      pen.clearRect(0, 0, width, ROWS.height);
      this.drawTracks(pen, width);
      if (answer.rounds.length) this.drawRounds(pen, answer);
      if (!(now - (this.overviewAt || 0) < 250)) {
        this.overviewAt = now;
        const shown = { width, left: ROWS.gutter, from: this.view.start, to: this.right, whole: this.whole };
        drawOverview(this.pen(this.overview), this.picture, shown);
        this.drawTable();
      }
      return !settled;
    }

    /** Move the window towards the newest round; true when it is there. */
    advance(answer) {
      if (!this.zoomed) this.span = this.ease(this.span || this.autoSpan(), this.autoSpan());
      this.span = this.span || 1;
      if (!this.following) return true;
      const goal = this.clock ?? Math.max(answer.end, answer.start + this.span);
      const near = this.right === undefined || Math.abs(goal - this.right) > 2 * this.span;
      this.right = near ? goal : this.ease(this.right, goal);
      return this.right === goal;
    }

    ease(from, to) {
      if (reduced() || Math.abs(to - from) < 0.004 * (this.span || 1)) return to;
      return from + 0.3 * (to - from);
    }

    pen(canvas) {
      const pen = canvas.getContext("2d");
      const ratio = devicePixelRatio || 1;
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.font = `11px ${this.picture.ink.font}`;
      pen.textBaseline = "middle";
      return pen;
    }

    x(t) {
      return ROWS.gutter + (t - this.view.start) * this.view.scale;
    }
    time(x) {
      return this.view.start + (x - ROWS.gutter) / this.view.scale;
    }

    drawTracks(pen, width) {
      const { ink, machine } = this.picture;
      pen.fillStyle = ink.track;
      for (const y of [ROWS.cpu, ROWS.gpu]) pen.fillRect(ROWS.gutter, y, width - ROWS.gutter, ROWS.lane);
      pen.textAlign = "left";
      const told = machine.shares !== undefined;
      this.name(pen, ROWS.cpu + ROWS.lane / 2, "Draft", told ? "CPU" : "guesses");
      this.name(pen, ROWS.gpu + ROWS.lane / 2, "Target", told ? (machine.shares ? "CPU" : "GPU") : "checks");
      this.name(pen, ROWS.strip + ROWS.stripHeight - 14, "", "guesses a step");
      this.drawAxis(pen, width);
    }

    /** A row's name, and below it what it runs on. */
    name(pen, y, title, below) {
      const { ink } = this.picture;
      pen.font = `600 12px ${ink.font}`;
      pen.fillStyle = ink.text;
      pen.fillText(title, 0, y - 6);
      pen.font = `10px ${ink.font}`;
      pen.fillStyle = ink.soft;
      const [first, rest] = below.split(" a ");
      pen.fillText(first, 0, y + (rest ? -5 : 7));
      if (rest) pen.fillText(`a ${rest}`, 0, y + 6);
    }

    drawAxis(pen, width) {
      const { ink } = this.picture;
      const step = niceStep(this.span / Math.max(2, (width - ROWS.gutter) / 90));
      pen.strokeStyle = ink.line;
      pen.fillStyle = ink.soft;
      pen.textAlign = "center";
      pen.lineWidth = 1;
      for (let t = Math.ceil(Math.max(0, this.view.start) / step) * step; t <= this.view.start + this.span; t += step) {
        const x = Math.round(this.x(t)) + 0.5;
        pen.beginPath();
        pen.moveTo(x, ROWS.cpu);
        pen.lineTo(x, ROWS.axis);
        pen.stroke();
        if (x < width - 18)
          pen.fillText(step < 0.1 ? `${Math.round(t * 1000)} ms` : `${+t.toFixed(2)} s`, x, ROWS.axis + 10);
      }
    }

    drawRounds(pen, answer) {
      const from = Math.max(0, answer.roundAt(this.view.start) - 1);
      const to = Math.min(answer.rounds.length, answer.roundAt(this.view.start + this.span) + 3);
      pen.save();
      pen.beginPath();
      pen.rect(ROWS.gutter, 0, this.view.width - ROWS.gutter, ROWS.height);
      pen.clip();
      const top = this.top(answer, from, to);
      const rounds = answer.rounds.slice(from, to);
      for (const round of rounds) this.drawRound(pen, round);
      this.drawPauses(pen, rounds);
      for (const round of rounds) this.drawColumn(pen, round, top);
      this.drawBudget(pen, answer, from, to, top);
      for (const { at, drafted, budget } of rounds) {
        if (!drafted.length) continue;
        const line = this.level(answer.state.own_budget || budget || -top, top);
        const above = this.level(drafted.length, top) - 6;
        const clear = Math.abs(line - above) < 8 ? line - 8 : above; // of the budget's line
        this.label(pen, `${drafted.length}`, ...at.map((t) => this.x(t)), clear);
      }
      pen.restore();
    }

    drawRound(pen, round) {
      const { ink } = this.picture;
      for (const [a, b, size] of round.batches)
        this.bar(pen, this.x(a), this.x(b), ROWS.cpu, ink.hatch, ink.cpu, `${size}`, ink.text);
      const [a, b] = round.at.map((t) => this.x(t));
      const chosen = this.picture.round === round.index;
      const prefill = round.phase === "prefill";
      this.bar(
        pen,
        a,
        b,
        ROWS.gpu,
        prefill ? ink.prefill : ink.gpu,
        chosen ? ink.text : ink.gpu,
        prefill ? "reads the prompt" : verdict(round, b - a),
        prefill ? ink.text : ink.onGpu,
      );
      if (round.waited) {
        pen.strokeStyle = ink.soft;
        pen.setLineDash([2, 3]);
        pen.beginPath();
        pen.moveTo(this.x(round.at[0] - round.waited), ROWS.gpu + ROWS.lane / 2);
        pen.lineTo(a, ROWS.gpu + ROWS.lane / 2);
        pen.stroke();
        pen.setLineDash([]);
      }
    }

    /** Where nothing was guessed because it did not pay, the draft's lane says so. */
    drawPauses(pen, rounds) {
      let from = null;
      for (const [i, { at, speculation }] of rounds.entries()) {
        if (speculation !== "paused") from = null;
        else from ??= at[0];
        if (from === null || rounds[i + 1]?.speculation === "paused") continue;
        const place = [this.x(from), this.x(at[1]), ROWS.cpu + ROWS.lane / 2, this.picture.ink.soft, this.picture.ink.track];
        this.label(pen, "guessing paused: it did not pay", ...place) || this.label(pen, "paused", ...place);
      }
    }

    /** The strip's column: how many tokens were drafted since the round before. */
    drawColumn(pen, round, top) {
      const [a, b] = round.at.map((t) => this.x(t));
      const y = this.level(round.drafted.length, top);
      pen.fillStyle = this.picture.ink.cpuSoft;
      pen.fillRect(a + 0.5, y, Math.max(1, b - a - 1), ROWS.strip + ROWS.stripHeight - y);
    }

    /** Where so many guesses are in the strip. */
    level(count, top) {
      return ROWS.strip + ROWS.stripHeight - (count / top) * (ROWS.stripHeight - ROWS.title - 12);
    }

    top(answer, from, to) {
      let most = 1;
      for (let i = from; i < to; i++)
        most = Math.max(most, answer.rounds[i].drafted.length, answer.rounds[i].budget || 0);
      return most;
    }

    /** The budget, computed or set by hand: a stepped line over the columns, named at its right end. */
    drawBudget(pen, answer, from, to, top) {
      const { ink } = this.picture;
      const own = answer.state.own_budget;
      const y = (budget) => Math.round(this.level(budget, top)) + 0.5;
      let last = 0;
      pen.strokeStyle = ink.budget;
      pen.lineWidth = 2;
      pen.setLineDash([6, 3]);
      pen.beginPath();
      for (let i = from; i < to; i++) {
        const { at, budget: computed } = answer.rounds[i];
        const budget = own || computed;
        if (!budget) continue;
        pen[last ? "lineTo" : "moveTo"](this.x(at[0]), y(budget));
        pen.lineTo(this.x(at[1]), y(budget));
        last = budget;
      }
      pen.stroke();
      pen.setLineDash([]);
      pen.lineWidth = 1;
      if (!last) return;
      const words = own ? `budget set by hand: γ = ${own}` : `computed budget γ* = ${fixed(last)}`;
      pen.font = `600 11px ${ink.font}`;
      pen.fillStyle = ink.budget;
      pen.textAlign = "right";
      pen.fillText(`╌ ${words}`, this.view.width - 4, ROWS.strip + 6);
      pen.font = `11px ${ink.font}`;
      this.named = this.view.width - 4 - this.room(pen, words);
    }

    /** Is this the name of the budget? It leads to what the budget means. */
    onName({ offsetX, offsetY }) {
      return this.named && this.picture.figures && offsetX > this.named && Math.abs(offsetY - ROWS.strip - 6) < 9;
    }

    bar(pen, a, b, y, fill, edge, label, labelColour) {
      if (b < ROWS.gutter || a > this.view.width) return;
      const width = Math.max(1.5, b - a - 1);
      pen.fillStyle = fill;
      pen.fillRect(a, y, width, ROWS.lane);
      pen.strokeStyle = edge;
      if (width > 3) pen.strokeRect(a + 0.5, y + 0.5, width - 1, ROWS.lane - 1);
      if (label) this.label(pen, label, a, b, y + ROWS.lane / 2 + 0.5, labelColour, fill);
    }

    /** A label in the middle of what is in view of a block; none (false) where there is no room. The block's own colour around
     * the letters (fill), or the background's, keeps lines and hatches out of them. */
    label(pen, text, a, b, y, colour = this.picture.ink.text, fill = "") {
      const { ink } = this.picture;
      const [left, right] = [Math.max(a, ROWS.gutter), Math.min(b, this.view.width)];
      if (right - left < this.room(pen, text) + 6) return false;
      pen.textAlign = "center";
      pen.lineJoin = "round";
      pen.lineWidth = 4;
      pen.strokeStyle = fill && fill !== ink.hatch ? fill : ink.paper;
      pen.strokeText(text, (left + right) / 2, y);
      pen.lineWidth = 1;
      pen.fillStyle = colour;
      pen.fillText(text, (left + right) / 2, y);
      return true;
    }

    /** Width of a label in pixels; the same few are asked for all the time. */
    room(pen, label) {
      if (!this.rooms.has(label)) this.rooms.set(label, pen.measureText(label).width);
      return this.rooms.get(label);
    }

    /** [start, end] of what can be looked at, in seconds: the answer, or all runs of one clock (see `share`). */
    get whole() {
      const { start, end } = this.picture.answer;
      return this.longest ? [0, this.longest] : [start, end];
    }

    jump(event) {
      const [start, end] = this.whole;
      const share = (event.offsetX - ROWS.gutter) / (this.overview.clientWidth - ROWS.gutter);
      this.unfollow();
      this.right = start + Math.min(Math.max(share, 0), 1) * (end - start) + this.span / 2;
      this.refresh();
    }

    /** The window has changed; lanes of the same clock (see `share`) get the same one. */
    refresh() {
      this.overviewAt = 0;
      this.picture.wake();
      for (const peer of this.peers || []) {
        const { right, span, zoomed, following } = this;
        if (following) peer.follow();
        else peer.unfollow();
        Object.assign(peer, { right, span, zoomed, overviewAt: 0 });
        peer.picture.wake();
      }
    }

    /** Show the same window as other lanes, on one axis of so many seconds. */
    share(peers, longest) {
      Object.assign(this, { peers, longest, right: 0, zoomed: true, clock: 0 });
    }

    /** The window of a shared clock: `span` seconds up to `clock`, until a hand moves it. */
    see(clock, span) {
      const other = this.given !== span;
      Object.assign(this, { clock, given: span });
      if (other && this.following) this.follow();
    }

    wheel(event) {
      if (!this.view || !(event.ctrlKey || event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) return;
      event.preventDefault();
      if (event.ctrlKey) this.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, this.time(event.offsetX));
      else this.pan(((event.deltaX || event.deltaY) / 500) * this.span);
    }

    zoom(factor, around = this.right) {
      const [start, end] = this.whole;
      const span = Math.min(Math.max(this.span * factor, 0.002), Math.max(end - start, 0.01) * 1.05);
      const share = (this.right - around) / this.span;
      this.zoomed = true;
      this.span = span;
      if (!this.following) this.right = around + share * span;
      this.refresh();
    }

    pan(by) {
      const [start, end] = this.whole;
      this.unfollow();
      this.zoomed = true;
      this.right = Math.min(Math.max(this.right + by, start + this.span * 0.2), end + this.span * 0.2);
      this.refresh();
    }

    key(event) {
      const actions = {
        ArrowLeft: () => this.pan(-0.2 * this.span),
        ArrowRight: () => this.pan(0.2 * this.span),
        "+": () => this.zoom(1 / 1.3),
        "=": () => this.zoom(1 / 1.3),
        "-": () => this.zoom(1.3),
        End: () => this.follow(),
        Home: () => {
          this.unfollow();
          this.right = this.whole[0] + this.span;
          this.refresh();
        },
        Escape: () => this.picture.tip.hide(),
      };
      if (!(event.key in actions) || event.ctrlKey || event.metaKey) return;
      actions[event.key]();
      event.preventDefault();
    }

    /** A press selects the round; dragging moves the window. */
    press(event) {
      const from = { x: event.clientX, right: this.right, moved: false };
      const move = (e) => {
        if (Math.abs(e.clientX - from.x) > 4) from.moved = true;
        if (!from.moved) return;
        this.right = from.right;
        this.pan((from.x - e.clientX) / this.view.scale);
      };
      const up = () => {
        removeEventListener("pointermove", move);
        removeEventListener("pointerup", up);
        const round = this.roundUnder(event.offsetX);
        if (from.moved) return;
        if (this.onName(event)) return this.picture.explain("drafted");
        if (round) this.picture.select(round.index);
      };
      addEventListener("pointermove", move);
      addEventListener("pointerup", up);
    }

    roundUnder(x) {
      const { answer } = this.picture;
      return this.view && x >= ROWS.gutter ? answer.rounds[answer.roundAt(this.time(x))] : undefined;
    }

    hover(event) {
      const round = event.buttons || this.onName(event) ? undefined : this.roundUnder(event.offsetX);
      this.canvas.style.cursor = this.onName(event) ? "pointer" : "";
      if (!round) return this.leave();
      const box = { left: event.clientX + 12, top: event.clientY, bottom: event.clientY };
      this.picture.glance(round.index);
      return this.picture.tip.show(box, tipContent(describeRound(round)));
    }

    leave() {
      this.picture.tip.hide();
      this.picture.glance(-1);
    }

    /** Bring a round into the window. */
    reveal(round) {
      const [from, to] = round.at;
      if (!this.view || (from >= this.right - this.span && to <= this.right)) return;
      this.unfollow();
      this.right = (from + to) / 2 + this.span / 2;
      this.refresh();
    }

    drawTable() {
      if (!this.table.open) return;
      const { rounds } = this.picture.answer;
      const key = `${this.picture.answer.generation}/${rounds.length}`;
      if (this.tabled === key) return;
      this.tabled = key;
      this.table.lastElementChild.replaceChildren(roundsTable(rounds.slice(-200)));
    }
  }

  function niceStep(rough) {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= rough);
  }

  Object.assign(window.duochat, { Lanes, ROWS });
})();
