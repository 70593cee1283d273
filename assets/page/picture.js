/* The live picture of an answer: ribbon, lanes, tree, gauges. No libraries, nothing fetched.
 *
 * duochatPicture(element, frame, resync) draws a frame of render.Live into element; resync() is called when frames were
 * lost. Words of the answer enter the page as textContent or as attributes, never as markup. Drawing happens once per
 * animation frame. The ribbon's textContent is the answer: marks, waiting and discarded tokens are generated content.
 */
(() => {
  "use strict";

  const KINDS = {
    accepted: "Accepted", correction: "Correction", bonus: "Bonus", plain: "Plain", rejected: "Rejected",
    ignored: "Ignored", waiting: "Waiting",
  };
  const reduced = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

  /* ---------- small tools ---------- */

  /** An element. props: "class", "text", "on" {event: handler}, "data" {…}; anything else is an attribute. */
  function el(tag, props = {}, ...children) {
    const node = tag.startsWith("svg:")
      ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
    for (const [key, value] of Object.entries(props)) {
      if (value === undefined || value === null || value === false) continue;
      if (key === "class") node.setAttribute("class", value);
      else if (key === "text") node.textContent = value;
      else if (key === "on") for (const [name, handler] of Object.entries(value)) node.addEventListener(name, handler);
      else if (key === "data") Object.assign(node.dataset, value);
      else node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.filter((c) => c !== null && c !== undefined));
    return node;
  }

  const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
  const fixed = (x, digits = 1) => (isNumber(x) ? x.toFixed(digits) : "–");
  const percent = (x) => (!isNumber(x) ? "–" : x > 0 && x < 0.005 ? "< 1 %" : `${Math.round(100 * x)} %`);
  const seconds = (x) => (!isNumber(x) ? "–" : x < 0.1 ? `${fixed(1000 * x, x < 0.01 ? 1 : 0)} ms` : `${fixed(x, 2)} s`);
  const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  /** Text made visible in a label: spaces and line ends have signs of their own. */
  const shown = (text) => (text === "" ? "∅" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (s) => "␣".repeat(s.length)));
  const quoted = (text) => `‘${text === "" ? "(no text)" : text.replace(/\n/g, "↵")}’`;

  /* ---------- model: frames -> rounds, tokens, drafts ---------- */

  class Model {
    constructor() { this.reset(); }

    reset() {
      this.n = 0;
      this.rounds = [];
      this.tokens = [];
      this.drafts = new Map();
      this.alive = new Set();
      this.state = {};
      this.gauges = {};
      this.generation = (this.generation || 0) + 1;
    }

    /** Take over a frame. Returns false when frames before it are missing. */
    apply(frame) {
      if (frame.from === 0) this.reset();
      else if (frame.n <= this.n) return true;
      else if (frame.from !== this.n) return false;
      this.n = frame.n;
      Object.assign(this.state, frame.state || {});
      if (frame.gauges) this.gauges = frame.gauges;
      for (const round of frame.rounds || []) this.add(round);
      if (frame.tail) this.tail(frame.tail);
      return true;
    }

    add(r) {
      const index = this.rounds.length;
      const round = {
        ...r, index, drafted: r.drafted || [], batches: r.batches || [], pending: r.pending || [],
        accepted: r.accepted || [], rejected: r.rejected || [], ignored: r.ignored || [], first: this.tokens.length,
      };
      for (const [id, parent, position, text, prob, reach, rank, origin] of round.drafted) {
        this.drafts.set(id, { id, parent, position, text, prob, reach, rank, origin, born: index, fate: "waiting" });
        this.alive.add(id);
      }
      round.tree = [...this.alive];
      for (const [id, prob] of round.pending) {
        const draft = this.drafts.get(id);
        if (draft) draft.targetProb = prob;
      }
      for (const fate of ["accepted", "rejected", "ignored"]) for (const id of round[fate]) this.settle(id, fate, index);
      round.tokens.forEach(([text, kind, prob, id], place) => {
        this.tokens.push({ text, kind, prob, draft: id, round: index, place, index: this.tokens.length });
      });
      this.rounds.push(round);
      if (round.tail) this.tail(round.tail);
    }

    settle(id, fate, index) {
      const draft = this.drafts.get(id);
      if (draft) Object.assign(draft, { fate, fated: index });
      this.alive.delete(id);
    }

    tail(text) {
      if (this.tokens.length) this.tokens[this.tokens.length - 1].text += text;
    }

    get text() { return this.tokens.map((t) => t.text).join(""); }
    get start() { return this.rounds.length ? this.rounds[0].at[0] : 0; }
    get end() { return this.rounds.length ? this.rounds[this.rounds.length - 1].at[1] : 0; }

    /** The likeliest chain of drafted tokens that wait below the end of the answer. */
    waiting(limit = 8) {
      const last = this.rounds[this.rounds.length - 1];
      if (!last || this.state.finish) return [];
      const chain = [];
      const nodes = [...this.alive].map((id) => this.drafts.get(id));
      let position = (last.position || 0) + last.tokens.length;
      let parent = null;
      while (chain.length < limit) {
        const next = nodes.filter((d) => d.position === position && (parent === null || d.parent === parent));
        if (!next.length) break;
        const best = next.reduce((a, b) => (b.reach > a.reach ? b : a));
        chain.push(best);
        [parent, position] = [best.id, position + 1];
      }
      return chain;
    }

    /** Index of the last round that began at or before time t, -1 before the first. */
    roundAt(t) {
      let [low, high] = [0, this.rounds.length];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.rounds[middle].at[0] <= t) low = middle + 1; else high = middle;
      }
      return low - 1;
    }
  }

  /* ---------- what is said of tokens and rounds ---------- */

  const origin = (draft) => (draft.origin === "ngram" ? "copied from the text so far (n-gram)" : "the draft model");

  /** [heading, sentence, facts] of an emitted token. */
  function describeToken(model, token) {
    const round = model.rounds[token.round];
    const draft = model.drafts.get(token.draft);
    const facts = [];
    if (draft && token.kind === "accepted") facts.push(["draft’s probability", percent(draft.prob)], ["from", origin(draft)]);
    if (isNumber(token.prob)) facts.push(["target’s probability", percent(token.prob)]);
    facts.push(["round", `${token.round + 1}`], ["place", `${token.place + 1} of ${round.tokens.length} in its round`]);
    return [`${KINDS[token.kind]} ${quoted(token.text)}`, sentence(token, draft, round), facts];
  }

  function sentence(token, draft, round) {
    const ahead = draft && !round.pending.some(([id]) => id === token.draft);
    if (token.kind === "accepted") {
      return ahead
        ? "The target chose it, and the draft had already prepared it for this outcome: nothing is lost."
        : "Drafted on the CPU; the target on the GPU chose the same token.";
    }
    if (token.kind === "correction") {
      return draft
        ? `The target put ${quoted(token.text)} where the draft had ${quoted(draft.text)}.`
        : "The target chose a token that the draft had not proposed.";
    }
    if (token.kind === "bonus") return "The whole draft was accepted; the target’s forward gives one token more.";
    return `The target alone: ${reason(round) || "nothing was drafted yet"}.`;
  }

  /** Why nothing is drafted, in words; "" when speculation is on. */
  const reason = ({ speculation = "on", reason = "" }) => (speculation === "on" ? "" : reason || "plain decoding drafts nothing");

  const BEFORE = { queued: "waiting for the engine", loading: "loading the models", prefill: "reading the prompt", decode: "reading the prompt", done: "no answer" };

  /** [state, text] of the badge. */
  function badge(model) {
    const { speculation = "", phase, decoder, error, finish } = model.state, why = reason(model.state);
    if (error) return ["error", `stopped: ${error}`];
    if (!model.rounds.length) return ["idle", BEFORE[phase] || "waiting for a message"];
    const who = decoder ? `${decoder}: ` : "";
    if (speculation === "warming") return ["warming", `speculation starting: ${why}`];
    if (speculation === "paused") return ["off", `speculation paused: ${why}`];
    if (speculation === "off") return ["off", `${who}${why}`];
    return ["on", `${who}${finish ? "drafted and verified in parallel" : "drafting and verifying"}`];
  }

  /* ---------- one tooltip for everything ---------- */

  class Tip {
    constructor(host) {
      this.host = host;
      this.id = `dp-tip-${(Tip.count = (Tip.count || 0) + 1)}`;
      this.node = el("div", { class: "dp-tip", role: "tooltip", id: this.id, hidden: true });
      host.append(this.node);
    }

    /** Show content beside a box given in client coordinates. */
    show(box, content, anchor = null) {
      this.node.replaceChildren(...content);
      this.node.hidden = false;
      this.anchor?.removeAttribute("aria-describedby");
      this.anchor = anchor;
      anchor?.setAttribute("aria-describedby", this.id);
      const host = this.host.getBoundingClientRect();
      const [width, height] = [this.node.offsetWidth, this.node.offsetHeight];
      const left = Math.min(Math.max(box.left - host.left, 4), Math.max(4, host.width - width - 4));
      const below = box.bottom + 6 + height < innerHeight || box.top - height - 6 < 0;
      this.node.style.left = `${left}px`;
      this.node.style.top = `${(below ? box.bottom + 6 : box.top - height - 6) - host.top}px`;
    }

    hide() {
      this.node.hidden = true;
      this.anchor?.removeAttribute("aria-describedby");
      this.anchor = null;
    }
  }

  function tipContent([heading, words, facts]) {
    const list = el("dl", {}, ...facts.flatMap(([k, v]) => [el("dt", { text: k }), el("dd", { text: v })]));
    return [el("strong", { text: heading }), words ? el("p", { text: words }) : null, facts.length ? list : null].filter(Boolean);
  }

  /** The unfolded chip: every rejected and ignored token of a round. */
  function discardedContent(model, round) {
    const item = (id, fate) => {
      const draft = model.drafts.get(id);
      if (!draft) return null;
      const ahead = draft.position - (round.position || 0) + 1;
      const share = isNumber(draft.targetProb) && fate === "rejected" ? ` · target ${percent(draft.targetProb)}` : "";
      return el("li", { class: `dp-${fate}` }, el("s", { data: { text: fate === "ignored" ? `[${shown(draft.text)}]` : shown(draft.text) } }),
        el("small", { text: `place ${ahead} · draft ${percent(draft.prob)}${share}${draft.origin === "ngram" ? " · n-gram" : ""}` }));
    };
    const part = (title, ids, fate) => (ids.length
      ? [el("p", { text: title }), el("ul", {}, ...ids.slice(0, 12).map((id) => item(id, fate))),
        ids.length > 12 ? el("small", { text: `and ${ids.length - 12} more` }) : null] : []);
    return [
      el("strong", { text: `Round ${round.index + 1}: drafted and thrown away` }),
      ...part("Rejected: the target chose another token there", round.rejected, "rejected"),
      ...part("Ignored: never reached, an earlier token was rejected or another branch won", round.ignored, "ignored"),
    ].filter(Boolean);
  }

  /* ---------- ribbon ---------- */

  class Ribbon {
    /** picture: {model, tip, select(round)}. */
    constructor(picture) {
      this.picture = picture;
      this.text = el("div", { class: "dp-text" });
      this.ghosts = el("span", { class: "dp-ghosts", "aria-hidden": "true" });
      this.node = el("div", {
        class: "dp-ribbon", tabindex: "0", role: "group", "aria-live": "off",
        "aria-label": "The answer, token by token. Arrow keys move from token to token.",
        on: {
          pointerover: (e) => this.point(e.target), pointerleave: () => this.rest(), click: (e) => this.click(e.target),
          keydown: (e) => this.key(e), focusin: (e) => this.focusin(e.target), focusout: () => picture.tip.hide(),
          copy: (e) => this.copy(e), scroll: () => this.scrolled(),
          wheel: () => this.touched(), touchmove: () => this.touched(), pointerdown: () => this.touched(),
        },
      }, this.text);
      new ResizeObserver(() => this.toEnd()).observe(this.text); // after the layout that is due anyway: forces none
      this.reset();
    }

    reset() {
      this.text.replaceChildren();
      this.spans = [];
      this.drawnRounds = 0;
      this.line = null;
      this.current = -1;
      this.stuck = true;
      this.generation = this.picture.model.generation;
    }

    draw() {
      const { model } = this.picture;
      if (this.generation !== model.generation) this.reset();
      const fresh = model.rounds.slice(this.drawnRounds);
      for (const round of fresh) this.append(round);
      this.drawnRounds = model.rounds.length;
      this.retail();
      this.drawGhosts(model.waiting());
    }

    /** The viewer's hand is on the ribbon: where it ends up says whether the ribbon follows the answer. */
    touched() { this.hand = performance.now(); }

    scrolled() {
      if (performance.now() - (this.hand || -1e9) < 500) this.stuck = this.atEnd();
    }

    toEnd() {
      if (this.stuck) this.node.scrollTop = this.node.scrollHeight;
    }

    append(round) {
      const { model } = this.picture;
      const tokens = model.tokens.slice(round.first, round.first + round.tokens.length);
      const thrown = round.rejected.length + round.ignored.length;
      tokens.forEach((token, place) => {
        if (thrown && place === tokens.length - 1) this.put(this.chip(round, thrown));
        this.spans.push(this.token(token));
      });
      if (thrown && !tokens.length) this.put(this.chip(round, thrown));
    }

    /** A token's span; one that holds a line end is split behind it, so that lines can be blocks. */
    token(token) {
      const cut = token.text.lastIndexOf("\n") + 1;
      const span = this.put(tokenSpan(token, cut ? token.text.slice(0, cut) : token.text));
      if (!cut) return this.broken(token, span);
      this.line = null;
      if (cut < token.text.length) this.put(tokenSpan(token, token.text.slice(cut), true));
      return span;
    }

    /** Lines are blocks, so that a new token costs the layout of one line, not of the whole answer. */
    put(node) {
      if (!this.line) this.text.append((this.line = el("div", { class: "dp-line" })));
      this.line.append(node);
      return node;
    }

    /** End a block that has grown long where the line wraps anyway: at a token whose space hangs at the line's end. */
    broken(token, span) {
      const length = this.line.childElementCount;
      if (length < 100 || !token.text.startsWith(" ") || (length < 200 && span.getClientRects().length < 2)) return span;
      span.textContent = " ";
      this.line = null;
      this.put(tokenSpan(token, token.text.slice(1), true));
      return span;
    }

    chip(round, count) {
      return el("span", {
        class: "dp-chip", role: "button", tabindex: "-1", data: { round: round.index, n: `·${count}` },
        "aria-label": `${plural(count, "drafted token")} thrown away in round ${round.index + 1}`,
      });
    }

    /** Text that came later for the last token. */
    retail() {
      const token = this.picture.model.tokens[this.spans.length - 1];
      if (!token || token.drawn === token.text) return;
      const span = this.spans[this.spans.length - 1];
      span.textContent += token.text.slice(token.drawn.length);
      token.drawn = token.text;
      mark(span, token.text);
    }

    drawGhosts(chain) {
      const key = chain.map((d) => d.id).join();
      if (this.ghosts.dataset.key !== key) {
        this.ghosts.dataset.key = key;
        this.ghosts.replaceChildren(...chain.map((d) => el("span", { class: "dp-ghost", data: { text: d.text.replace(/\n/g, "↵"), draft: d.id } })));
      }
      if (chain.length && this.ghosts !== this.line?.lastChild) this.put(this.ghosts);
    }

    atEnd() { return this.node.scrollTop + this.node.clientHeight >= this.node.scrollHeight - 8; }

    point(target) {
      const spot = target.closest?.(".dp-t, .dp-chip, .dp-ghost");
      if (spot) this.show(spot); else if (!this.node.contains(document.activeElement)) this.picture.tip.hide();
    }

    rest() { if (!this.node.contains(document.activeElement)) this.picture.tip.hide(); }

    focusin(target) {
      if (target === this.node) return;
      const spot = target.closest(".dp-t, .dp-chip");
      if (spot) this.show(spot);
    }

    click(target) {
      const spot = target.closest(".dp-t, .dp-chip");
      if (!spot) return;
      this.show(spot);
      this.picture.select(this.roundOf(spot));
    }

    roundOf(spot) {
      return spot.dataset.round !== undefined ? Number(spot.dataset.round) : this.picture.model.tokens[spot.dataset.i].round;
    }

    show(spot) {
      const { model, tip } = this.picture;
      const box = spot.getClientRects()[0] || spot.getBoundingClientRect();
      if (spot.classList.contains("dp-chip")) tip.show(box, discardedContent(model, model.rounds[spot.dataset.round]), spot);
      else if (spot.classList.contains("dp-ghost")) {
        const draft = model.drafts.get(Number(spot.dataset.draft));
        if (draft) tip.show(box, tipContent([`Waiting ${quoted(draft.text)}`, "Drafted on the CPU, waiting for the target.", [["draft’s probability", percent(draft.prob)], ["from", origin(draft)]]]));
      } else tip.show(box, tipContent(describeToken(model, model.tokens[spot.dataset.i])), spot);
    }

    /** All places that arrows stop at, in order. */
    stops() { return [...this.text.querySelectorAll(".dp-t:not(.dp-rest), .dp-chip")]; }

    key(event) {
      const stops = this.stops();
      const at = stops.indexOf(document.activeElement);
      const moves = { ArrowRight: at + 1, ArrowLeft: at < 0 ? stops.length - 1 : at - 1, Home: 0, End: stops.length - 1,
        ArrowDown: this.vertical(stops, at, 1), ArrowUp: this.vertical(stops, at, -1) };
      if (event.key === "Escape") this.escape(at);
      else if (event.key === "Enter" || event.key === " ") { if (at >= 0) this.click(stops[at]); }
      else if (event.key in moves && !event.ctrlKey && !event.metaKey && !event.altKey) {
        this.touched();
        stops[Math.min(Math.max(moves[event.key], 0), stops.length - 1)]?.focus({ preventScroll: false });
      } else return;
      event.preventDefault();
    }

    escape(at) {
      if (this.picture.tip.node.hidden && at >= 0) this.node.focus();
      this.picture.tip.hide();
    }

    /** The stop on the next line (direction 1) or the line before (-1), nearest to this one. */
    vertical(stops, at, direction) {
      if (at < 0) return 0;
      const here = stops[at].getBoundingClientRect();
      let best = at;
      let bestGap = Infinity;
      for (let i = at + direction, line = null; i >= 0 && i < stops.length; i += direction) {
        const box = stops[i].getBoundingClientRect();
        if (Math.abs(box.top - here.top) < 4) continue;
        line = line ?? box.top;
        if (Math.abs(box.top - line) > 4) break;
        if (Math.abs(box.left - here.left) < bestGap) [best, bestGap] = [i, Math.abs(box.left - here.left)];
      }
      return best;
    }

    copy(event) {
      const selection = getSelection();
      if (!selection.rangeCount || selection.isCollapsed) return;
      event.clipboardData.setData("text/plain", selection.getRangeAt(0).cloneContents().textContent);
      event.preventDefault();
    }

    highlight(round) {
      for (const span of this.marked || []) span.classList.remove("dp-selected");
      const chosen = this.picture.model.rounds[round];
      this.marked = chosen ? this.spans.slice(chosen.first, chosen.first + chosen.tokens.length) : [];
      for (const span of this.marked) span.classList.add("dp-selected");
    }
  }

  function tokenSpan(token, text, rest = false) {
    const span = el("span", { class: `dp-t dp-${token.kind}${rest ? " dp-rest" : ""}`, tabindex: rest ? undefined : "-1", text, data: { i: token.index } });
    mark(span, text);
    token.drawn = token.text;
    return span;
  }

  /** Signs for what has no shape: line ends and tokens without text. */
  function mark(span, text) {
    span.classList.toggle("dp-empty", text === "");
    span.classList.toggle("dp-nl", text.includes("\n"));
  }

  /* ---------- lanes ---------- */

  const ROWS = { cpu: 4, gpu: 40, strip: 78, axis: 146, height: 164, lane: 30, stripHeight: 64, title: 14, gutter: 50 };

  class Lanes {
    constructor(picture) {
      this.picture = picture;
      this.rooms = new Map();
      this.canvas = el("canvas", {
        class: "dp-canvas", tabindex: "0", role: "img",
        "aria-label": "Time line: draft batches on the CPU above, verifications on the GPU below. Left and right move, plus and minus zoom, End follows. The table below has the same data.",
        on: {
          wheel: (e) => this.wheel(e), pointerdown: (e) => this.press(e), pointermove: (e) => this.hover(e),
          pointerleave: () => picture.tip.hide(), keydown: (e) => this.key(e),
        },
      });
      this.overview = el("canvas", { class: "dp-overview", "aria-hidden": "true", on: { pointerdown: (e) => this.jump(e), pointermove: (e) => e.buttons && this.jump(e) } });
      this.live = el("button", { type: "button", class: "dp-button", text: "follow", "aria-pressed": "true", on: { click: () => this.follow() } });
      this.table = el("details", { class: "dp-table", on: { toggle: () => this.drawTable() } }, el("summary", { text: "The same as a table" }), el("div"));
      this.node = el("figure", { class: "dp-lanes" },
        el("figcaption", {}, el("b", { text: "Two lanes, one clock" }), lanesKey(), this.live),
        this.canvas, this.overview, this.table);
      new ResizeObserver(([entry]) => { this.width = entry.contentRect.width; this.refresh(); }).observe(this.canvas);
      this.follow();
    }

    follow() {
      this.following = true;
      this.zoomed = false;
      this.live.setAttribute("aria-pressed", "true");
      this.picture.wake?.();
    }

    unfollow() {
      this.following = false;
      this.live.setAttribute("aria-pressed", "false");
    }

    /** Seconds in view until the viewer zooms: as many rounds as have room for their numbers. */
    autoSpan() {
      const { rounds } = this.picture.model;
      const last = rounds.slice(-24);
      if (!last.length) return 1;
      const length = last[last.length - 1].at[1] - last[0].at[0];
      return Math.min(Math.max(0.02, Math.min(((this.width / 75) * length) / last.length, this.picture.model.end)), 60);
    }

    /** Give both canvases the pixels of their size. */
    fit() {
      const ratio = devicePixelRatio || 1;
      for (const [canvas, height] of [[this.canvas, ROWS.height], [this.overview, 30]]) {
        const width = Math.round(this.width * ratio);
        if (canvas.width !== width || canvas.height !== height * ratio) [canvas.width, canvas.height] = [width, height * ratio];
      }
    }

    /** Draw the window; true while it still moves. */
    draw(now) {
      const { width } = this;
      if (!width) return false;
      this.fit();
      const { model } = this.picture;
      const settled = this.advance(model);
      this.view = { width, start: this.right - this.span, scale: (width - ROWS.gutter - 6) / this.span };
      const pen = this.pen(this.canvas);
      pen.clearRect(0, 0, width, ROWS.height);
      this.drawFrame(pen, width);
      if (model.rounds.length) this.drawRounds(pen, model);
      if (!(now - (this.overviewAt || 0) < 250)) { this.overviewAt = now; this.drawOverview(model); this.drawTable(); }
      return !settled;
    }

    /** Move the window towards the newest round; true when it is there. */
    advance(model) {
      if (!this.zoomed) this.span = this.ease(this.span || this.autoSpan(), this.autoSpan());
      this.span = this.span || 1;
      if (!this.following) return true;
      const goal = Math.max(model.end, model.start + this.span);
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

    x(t) { return ROWS.gutter + (t - this.view.start) * this.view.scale; }
    time(x) { return this.view.start + (x - ROWS.gutter) / this.view.scale; }

    drawFrame(pen, width) {
      const { ink } = this.picture;
      pen.fillStyle = ink.track;
      for (const y of [ROWS.cpu, ROWS.gpu]) pen.fillRect(ROWS.gutter, y, width - ROWS.gutter, ROWS.lane);
      pen.fillStyle = ink.text;
      pen.textAlign = "left";
      pen.font = `600 12px ${ink.font}`;
      pen.fillText("CPU", 0, ROWS.cpu + ROWS.lane / 2 - 6);
      pen.fillText("GPU", 0, ROWS.gpu + ROWS.lane / 2 - 6);
      pen.font = `10px ${ink.font}`;
      pen.fillStyle = ink.soft;
      pen.fillText("drafts", 0, ROWS.cpu + ROWS.lane / 2 + 7);
      pen.fillText("verifies", 0, ROWS.gpu + ROWS.lane / 2 + 7);
      pen.fillText("drafted", 0, ROWS.strip + ROWS.stripHeight - 20);
      pen.fillText("a round", 0, ROWS.strip + ROWS.stripHeight - 8);
      this.drawAxis(pen, width);
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
        if (x < width - 18) pen.fillText(step < 0.1 ? `${Math.round(t * 1000)} ms` : `${+t.toFixed(2)} s`, x, ROWS.axis + 10);
      }
    }

    drawRounds(pen, model) {
      const from = Math.max(0, model.roundAt(this.view.start) - 1);
      const to = Math.min(model.rounds.length, model.roundAt(this.view.start + this.span) + 3);
      pen.save();
      pen.beginPath();
      pen.rect(ROWS.gutter, 0, this.view.width - ROWS.gutter, ROWS.height);
      pen.clip();
      const top = this.top(model, from, to);
      for (let i = from; i < to; i++) this.drawRound(pen, model.rounds[i], top);
      this.drawBudget(pen, model, from, to, top);
      pen.restore();
    }

    drawRound(pen, round, top) {
      const { ink } = this.picture;
      for (const [a, b, size] of round.batches) this.bar(pen, this.x(a), this.x(b), ROWS.cpu, ink.hatch, ink.cpu, `${size}`, ink.text);
      const [a, b] = round.at.map((t) => this.x(t));
      const chosen = this.picture.selected === round.index;
      const prefill = round.phase === "prefill";
      this.bar(pen, a, b, ROWS.gpu, prefill ? ink.prefill : ink.gpu, chosen ? ink.text : ink.gpu, prefill ? "reads the prompt" : verdict(round, b - a), prefill ? ink.text : ink.onGpu);
      if (round.waited) {
        pen.strokeStyle = ink.soft;
        pen.setLineDash([2, 3]);
        pen.beginPath();
        pen.moveTo(this.x(round.at[0] - round.waited), ROWS.gpu + ROWS.lane / 2);
        pen.lineTo(a, ROWS.gpu + ROWS.lane / 2);
        pen.stroke();
        pen.setLineDash([]);
      }
      this.drawCount(pen, round, a, b, top);
    }

    /** The strip's column: how many tokens were drafted since the round before. */
    drawCount(pen, round, a, b, top) {
      const { ink } = this.picture;
      const count = round.drafted.length;
      if (!count) return;
      const height = (count / top) * (ROWS.stripHeight - ROWS.title - 12);
      const y = ROWS.strip + ROWS.stripHeight - height;
      pen.fillStyle = ink.cpuSoft;
      pen.fillRect(a + 0.5, y, Math.max(1, b - a - 1), height);
      if (b - a > 14) {
        pen.fillStyle = ink.text;
        pen.textAlign = "center";
        pen.fillText(`${count}`, (a + b) / 2, y - 6);
      }
    }

    top(model, from, to) {
      let most = 1;
      for (let i = from; i < to; i++) most = Math.max(most, model.rounds[i].drafted.length, model.rounds[i].budget || 0);
      return most;
    }

    /** γ*: a stepped line over the columns, named at its right end. */
    drawBudget(pen, model, from, to, top) {
      const { ink } = this.picture;
      const y = (budget) => Math.round(ROWS.strip + ROWS.stripHeight - (budget / top) * (ROWS.stripHeight - ROWS.title - 12)) + 0.5;
      let last = 0;
      pen.strokeStyle = ink.budget;
      pen.lineWidth = 2;
      pen.setLineDash([6, 3]);
      pen.beginPath();
      for (let i = from; i < to; i++) {
        const { at, budget } = model.rounds[i];
        if (!budget) continue;
        pen[last ? "lineTo" : "moveTo"](this.x(at[0]), y(budget));
        pen.lineTo(this.x(at[1]), y(budget));
        last = budget;
      }
      pen.stroke();
      pen.setLineDash([]);
      pen.lineWidth = 1;
      if (!last) return;
      pen.font = `600 11px ${ink.font}`;
      pen.fillStyle = ink.budget;
      pen.textAlign = "right";
      pen.fillText(`╌ computed budget γ* = ${fixed(last)}`, this.view.width - 4, ROWS.strip + 6);
      pen.font = `11px ${ink.font}`;
    }

    bar(pen, a, b, y, fill, edge, label, labelColour) {
      if (b < ROWS.gutter || a > this.view.width) return;
      const width = Math.max(1.5, b - a - 1);
      pen.fillStyle = fill;
      pen.fillRect(a, y, width, ROWS.lane);
      pen.strokeStyle = edge;
      if (width > 3) pen.strokeRect(a + 0.5, y + 0.5, width - 1, ROWS.lane - 1);
      const room = label ? this.room(pen, label) : 0;
      if (!label || width < room + 4) return;
      const middle = Math.min(Math.max((a + b) / 2, ROWS.gutter + 10), this.view.width - 10);
      pen.textAlign = "center";
      if (fill === this.picture.ink.hatch) {
        pen.fillStyle = this.picture.ink.paper;
        pen.fillRect(middle - room / 2 - 2, y + ROWS.lane / 2 - 8, room + 4, 16);
      }
      pen.fillStyle = labelColour;
      pen.fillText(label, middle, y + ROWS.lane / 2 + 0.5);
    }

    /** Width of a label in pixels; the same few are asked for all the time. */
    room(pen, label) {
      if (!this.rooms.has(label)) this.rooms.set(label, pen.measureText(label).width);
      return this.rooms.get(label);
    }

    /** The whole answer in a strip: share of each column in which a lane ran, and the window. */
    drawOverview(model) {
      const { width } = this;
      const pen = this.pen(this.overview);
      const { ink } = this.picture;
      pen.clearRect(0, 0, width, 30);
      pen.fillStyle = ink.track;
      pen.fillRect(ROWS.gutter, 2, width - ROWS.gutter, 12);
      pen.fillRect(ROWS.gutter, 16, width - ROWS.gutter, 12);
      pen.fillStyle = ink.soft;
      pen.font = `10px ${ink.font}`;
      pen.textAlign = "left";
      pen.fillText("whole", 0, 15);
      if (!model.rounds.length) return;
      const columns = Math.max(1, Math.floor((width - ROWS.gutter) / 2));
      const [start, length] = [model.start, Math.max(model.end - model.start, 1e-6)];
      const busy = busyShares(model, start, length, columns);
      for (const [lane, y, colour] of [[busy.cpu, 14, ink.cpu], [busy.gpu, 28, ink.gpu]]) {
        pen.fillStyle = colour;
        lane.forEach((share, i) => { if (share > 0.01) pen.fillRect(ROWS.gutter + 2 * i, y - 12 * share, 2, 12 * share); });
      }
      const x = (t) => ROWS.gutter + ((t - start) / length) * (width - ROWS.gutter);
      pen.strokeStyle = ink.text;
      pen.lineWidth = 1.5;
      const left = Math.max(ROWS.gutter, x(this.view.start));
      pen.strokeRect(left, 1, Math.max(3, Math.min(width - 1, x(this.right)) - left), 28);
      pen.lineWidth = 1;
    }

    jump(event) {
      const { model } = this.picture;
      const share = (event.offsetX - ROWS.gutter) / (this.overview.clientWidth - ROWS.gutter);
      this.unfollow();
      this.right = model.start + Math.min(Math.max(share, 0), 1) * (model.end - model.start) + this.span / 2;
      this.refresh();
    }

    refresh() {
      this.overviewAt = 0;
      this.picture.wake();
    }

    wheel(event) {
      if (!this.view || !(event.ctrlKey || event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) return;
      event.preventDefault();
      if (event.ctrlKey) this.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, this.time(event.offsetX));
      else this.pan(((event.deltaX || event.deltaY) / 500) * this.span);
    }

    zoom(factor, around = this.right) {
      const { model } = this.picture;
      const span = Math.min(Math.max(this.span * factor, 0.002), Math.max(model.end - model.start, 0.01) * 1.05);
      const share = (this.right - around) / this.span;
      this.zoomed = true;
      this.span = span;
      if (!this.following) this.right = around + share * span;
      this.refresh();
    }

    pan(by) {
      const { model } = this.picture;
      this.unfollow();
      this.zoomed = true;
      this.right = Math.min(Math.max(this.right + by, model.start + this.span * 0.2), model.end + this.span * 0.2);
      this.refresh();
    }

    key(event) {
      const actions = {
        ArrowLeft: () => this.pan(-0.2 * this.span), ArrowRight: () => this.pan(0.2 * this.span),
        "+": () => this.zoom(1 / 1.3), "=": () => this.zoom(1 / 1.3), "-": () => this.zoom(1.3), End: () => this.follow(),
        Home: () => { this.unfollow(); this.right = this.picture.model.start + this.span; this.refresh(); },
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
        if (!from.moved && round) this.picture.select(round.index);
      };
      addEventListener("pointermove", move);
      addEventListener("pointerup", up);
    }

    roundUnder(x) {
      const { model } = this.picture;
      return this.view && x >= ROWS.gutter ? model.rounds[model.roundAt(this.time(x))] : undefined;
    }

    hover(event) {
      const round = event.buttons ? undefined : this.roundUnder(event.offsetX);
      if (!round) return this.picture.tip.hide();
      const box = { left: event.clientX + 12, top: event.clientY, bottom: event.clientY };
      return this.picture.tip.show(box, tipContent(describeRound(round)));
    }

    drawTable() {
      if (!this.table.open) return;
      const { rounds } = this.picture.model;
      const key = `${this.picture.model.generation}/${rounds.length}`;
      if (this.tabled === key) return;
      this.tabled = key;
      this.table.lastElementChild.replaceChildren(roundsTable(rounds.slice(-200)));
    }
  }

  /** What a verification brought, as wide as there is room for. */
  function verdict(round, room) {
    const sign = { correction: " ▲", bonus: " ✚" }[round.tokens[round.tokens.length - 1]?.[1]] || "";
    const brief = `+${round.tokens.length}`;
    if (room > 150 && round.pending.length) return `${round.pending.length} tested, +${round.tokens.length} token${round.tokens.length === 1 ? "" : "s"}${sign}`;
    return room > 44 ? brief + sign : brief;
  }

  function describeRound(round) {
    const facts = [
      ["GPU verified", `${round.pending.length} in ${seconds(round.at[1] - round.at[0])}`],
      ["accepted", `${round.accepted.length}`], ["rejected", `${round.rejected.length}`], ["ignored", `${round.ignored.length}`],
      ["tokens emitted", `${round.tokens.length}`], ["CPU drafted", `${round.drafted.length} in ${plural(round.batches.length, "batch").replace("batchs", "batches")}`],
    ];
    if (round.budget) facts.push(["budget γ*", fixed(round.budget)]);
    if (round.waited) facts.push(["GPU waited for a draft", seconds(round.waited)]);
    if (round.hit !== undefined && round.hit !== null) facts.push(["outcome was prefetched", round.hit ? "yes" : "no"]);
    return [`Round ${round.index + 1}`, reason(round), facts];
  }

  const COLUMNS = ["round", "GPU from", "GPU to", "CPU busy", "drafted", "γ*", "tested", "accepted", "rejected", "ignored", "emitted"];

  function roundsTable(rounds) {
    const row = (r) => [
      r.index + 1, seconds(r.at[0]), seconds(r.at[1]), seconds(r.batches.reduce((sum, [a, b]) => sum + b - a, 0)), r.drafted.length,
      fixed(r.budget), r.pending.length, r.accepted.length, r.rejected.length, r.ignored.length, r.tokens.length,
    ];
    return el("table", {}, el("caption", { text: `Rounds ${rounds.length ? rounds[0].index + 1 : 0} to ${rounds.length ? rounds[rounds.length - 1].index + 1 : 0}` }),
      el("thead", {}, el("tr", {}, ...COLUMNS.map((c) => el("th", { scope: "col", text: c })))),
      el("tbody", {}, ...rounds.map((r) => el("tr", {}, ...row(r).map((v) => el("td", { text: `${v}` }))))));
  }

  function lanesKey() {
    const item = (kind, text) => el("span", {}, el("i", { class: `dp-swatch dp-swatch-${kind}`, "aria-hidden": "true" }), text);
    return el("span", { class: "dp-key" }, item("cpu", "draft batch (tokens in it)"), item("gpu", "verification (+ tokens gained)"), item("idle", "idle"), item("budget", "budget γ*"));
  }

  function niceStep(rough) {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= rough);
  }

  function busyShares(model, start, length, columns) {
    const busy = { cpu: new Float32Array(columns), gpu: new Float32Array(columns) };
    const width = length / columns;
    const spread = (lane, a, b) => {
      const last = Math.min(columns - 1, Math.floor((b - start) / width));
      for (let i = Math.max(0, Math.floor((a - start) / width)); i <= last; i++) {
        const [left, right] = [start + i * width, start + (i + 1) * width];
        lane[i] = Math.min(1, lane[i] + Math.max(0, Math.min(b, right) - Math.max(a, left)) / width);
      }
    };
    for (const round of model.rounds) {
      spread(busy.gpu, round.at[0], round.at[1]);
      for (const [a, b] of round.batches) spread(busy.cpu, a, b);
    }
    return busy;
  }

  /* ---------- gauges ---------- */

  class Gauges {
    constructor(picture) {
      this.picture = picture;
      this.node = el("div", { class: "dp-gauges", role: "group", "aria-label": "Figures of this answer" });
      this.cards = {};
      for (const [key, title, hint] of [
        ["speed", "Speed", "Tokens per second from the first token to the last one; now: over the last two seconds; first: time to the first token."],
        ["speedup", "Speedup", "This answer’s tokens/s over the tokens/s of plain decoding measured on this machine, same engine."],
        ["tau", "τ, tokens a forward", "Tokens emitted per target forward, the correction or bonus included. Plain decoding has 1."],
        ["alpha", "α, acceptance", "Accepted over tested draft tokens. Read it together with drafted per round and τ."],
        ["drafted", "Drafted a round", "Tokens drafted per round, recently, beside the computed budget γ* = T_target / T_draft."],
      ]) this.node.append(this.card(key, title, hint));
      this.node.append(this.laneCard());
    }

    card(key, title, hint) {
      const parts = { value: el("b", { text: "–" }), bar: el("i", { class: `dp-meter dp-meter-${key}` }), note: el("small") };
      this.cards[key] = parts;
      return el("div", { class: `dp-gauge dp-gauge-${key}`, title: hint }, el("span", { text: title }), parts.value, parts.bar, parts.note);
    }

    laneCard() {
      const lane = (key, name) => {
        const parts = { bar: el("i", { class: `dp-busy dp-busy-${key}` }), note: el("small") };
        this.cards[key] = parts;
        return el("div", { class: "dp-lane" }, el("em", { text: name }), parts.bar, parts.note);
      };
      return el("div", { class: "dp-gauge dp-gauge-lanes", title: "Busy now (over the last two seconds), and idle over the whole answer." },
        el("span", { text: "Busy now" }), lane("cpu", "CPU"), lane("gpu", "GPU"));
    }

    set(key, value, share, note) {
      const { value: number, bar, note: small } = this.cards[key];
      if (number) number.textContent = value;
      bar.style.setProperty("--v", isNumber(share) ? Math.min(Math.max(share, 0), 1).toFixed(3) : "0");
      small.textContent = note;
    }

    draw() {
      const { model } = this.picture;
      const g = model.gauges;
      this.set("speed", isNumber(g.rate) ? `${fixed(g.rate)} tok/s` : "–", null, `now ${fixed(g.now)} · first ${seconds(g.ttft)}`);
      this.set("speedup", isNumber(g.speedup) ? `${fixed(g.speedup, 2)}×` : "–", null, speedupNote(g, model));
      this.cards.speedup.value.classList.toggle("dp-bad", isNumber(g.speedup) && g.speedup < 1);
      this.set("tau", fixed(g.tau, 2), null, `${g.tokens || 0} in ${plural(g.rounds || 0, "forward")}`);
      this.set("alpha", percent(g.alpha), g.alpha, `${g.accepted || 0} of ${(g.accepted || 0) + (g.rejected || 0)} tested`);
      const scale = 1.25 * Math.max(g.budget || 0, g.drafted_per_round || 0, 1);
      this.set("drafted", fixed(g.drafted_per_round), (g.drafted_per_round || 0) / scale, g.budget ? `budget γ* ${fixed(g.budget)}` : "budget not known");
      this.cards.drafted.bar.style.setProperty("--goal", g.budget ? (g.budget / scale).toFixed(3) : "-1");
      for (const lane of ["cpu", "gpu"]) {
        const load = g[`${lane}_load`];
        this.set(lane, "", g[`${lane}_busy`], `${percent(g[`${lane}_busy`])} · idle ${percent(g[`${lane}_idle`])}${isNumber(load) ? ` · load ${percent(load)}` : ""}`);
      }
    }
  }

  /** The reason beside a speedup, mostly where it is below 1. */
  function speedupNote(g, model) {
    if (!isNumber(g.speedup)) return model.state.decoder === "autoregressive" ? "this is plain decoding" : "plain not measured yet";
    if (g.speedup >= 1) return `plain: ${fixed(g.plain_rate)} tok/s`;
    if (isNumber(g.alpha) && g.alpha < 0.5) return "slower: most drafts are rejected";
    return isNumber(g.tau) && g.tau < 1.2 ? "slower: too little is drafted in time" : "slower: forwards cost more than they gain";
  }

  /* ---------- tree of a round ---------- */

  const CELL = { width: 96, height: 38, box: 80, tall: 23, pad: 8 };

  /** What the tree of a round shows: nodes with column, row and state; the root is {id: -1, column: 0}. */
  function layoutTree(model, index, limit = 60) {
    const round = model.rounds[index];
    const pending = new Set(round.pending.map(([id]) => id));
    const rank = (d) => (round.accepted.includes(d.id) ? 2 : pending.has(d.id) ? 1 : 0) + d.reach;
    const drafts = round.tree.map((id) => model.drafts.get(id)).sort((a, b) => rank(b) - rank(a)).slice(0, limit);
    const nodes = new Map(drafts.map((d) => [d.id, { draft: d, state: stateIn(d, round), pending: pending.has(d.id), children: [] }]));
    const before = model.tokens[round.first - 1];
    const root = { root: true, text: before ? before.text : "…", children: [] };
    const rootId = before && before.kind === "accepted" ? before.draft : -1;
    const above = ({ parent, position }) => nodes.get(parent) || (parent === rootId && position === round.position ? root : null);
    for (const node of nodes.values()) above(node.draft)?.children.push(node); // what hangs below a dead token is left out
    const last = round.tokens[round.tokens.length - 1];
    if (last && last[1] !== "accepted") {
      const tip = nodes.get(round.accepted[round.accepted.length - 1]) || root;
      tip.children.unshift({ target: true, text: last[0], state: last[1], prob: last[2], children: [] });
    }
    return place(root, (n) => (n.draft ? rank(n.draft) : 3));
  }

  function stateIn(draft, round) {
    return draft.fated === round.index ? draft.fate : "waiting";
  }

  /** Columns by depth, rows in order of the leaves; the likeliest child stays on its parent's row. */
  function place(root, weight) {
    const all = [];
    let rows = 0;
    const walk = (node, column, row) => {
      Object.assign(node, { column, row });
      all.push(node);
      node.children.sort((a, b) => weight(b) - weight(a));
      node.children.forEach((child, i) => {
        if (i) rows += 1;
        child.parentNode = node;
        walk(child, column + 1, i ? rows : row);
      });
    };
    walk(root, 0, 0);
    return { nodes: all, columns: Math.max(...all.map((n) => n.column)) + 1, rows: rows + 1 };
  }

  class Tree {
    constructor(picture) {
      this.picture = picture;
      this.title = el("span", { class: "dp-tree-title" });
      this.release = el("button", { type: "button", class: "dp-button", text: "follow", hidden: true, on: { click: () => picture.select(-1) } });
      this.step = (by, text, label) => el("button", { type: "button", class: "dp-button", text, "aria-label": label, on: { click: () => picture.select(Math.max(0, this.index() + by)) } });
      this.scroll = el("div", { class: "dp-tree-scroll", tabindex: "0", role: "img", "aria-label": "Draft tree of the round" });
      this.node = el("figure", { class: "dp-tree" },
        el("figcaption", {}, el("b", { text: "Draft tree" }), this.step(-1, "‹", "round before"), this.title, this.step(1, "›", "next round"), this.release), this.scroll);
    }

    index() {
      const { model, selected } = this.picture;
      return selected >= 0 ? Math.min(selected, model.rounds.length - 1) : model.rounds.length - 1;
    }

    draw() {
      const { model, selected } = this.picture;
      const index = this.index();
      this.release.hidden = selected < 0;
      if (index < 0) { this.title.textContent = "appears with the first round"; return this.scroll.replaceChildren(); }
      const round = model.rounds[index];
      const words = treeWords(model, index);
      this.title.textContent = `round ${index + 1} of ${model.rounds.length}`;
      this.scroll.setAttribute("aria-label", words);
      this.scroll.replaceChildren(drawTree(layoutTree(model, index), round, this.picture.tip), el("p", { class: "dp-tree-words", text: words }));
      return undefined;
    }
  }

  function treeWords(model, index) {
    const round = model.rounds[index];
    const last = round.tokens[round.tokens.length - 1];
    const kept = round.tree.filter((id) => { const d = model.drafts.get(id); return d.fate === "waiting" || d.fated > index; }).length;
    if (!round.pending.length && !round.accepted.length) return `Nothing was tested: ${reason(round) || "no draft was ready"}. The target gave ${quoted(last ? last[0] : "")}.`;
    const end = { correction: `then the target put ${quoted(last?.[0])} instead`, bonus: `and the target added ${quoted(last?.[0])}`, accepted: "and the outcome was waiting in the tree", plain: "" }[last?.[1]] || "";
    return `${round.pending.length} tested, ${round.accepted.length} accepted, ${end}. ${kept} drafted tokens stay for the next round${round.hit ? " (prefetched for this outcome)" : ""}.`;
  }

  function drawTree({ nodes, columns, rows }, round, tip) {
    const [width, height] = [columns * CELL.width + CELL.pad, rows * CELL.height + CELL.pad];
    const svg = el("svg:svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true", class: "dp-tree-svg" });
    for (const n of nodes) if (n.parentNode) svg.append(edge(n));
    for (const n of nodes) svg.append(treeNode(n, round, tip));
    return svg;
  }

  const corner = (n) => [CELL.pad / 2 + n.column * CELL.width, CELL.pad / 2 + n.row * CELL.height];

  function edge(n) {
    const [x2, y2] = corner(n);
    const [x1, y1] = corner(n.parentNode);
    const [a, b, c] = [x1 + CELL.box, y1 + CELL.tall / 2, y2 + CELL.tall / 2];
    const bend = (x2 - a) / 2;
    return el("svg:path", { class: `dp-edge dp-edge-${n.state}`, d: `M${a},${b} C${a + bend},${b} ${x2 - bend},${c} ${x2},${c}` });
  }

  function treeNode(n, round, tip) {
    const [x, y] = corner(n);
    const text = n.draft ? n.draft.text : n.text;
    const state = n.root ? "root" : n.state;
    const sign = { correction: "▲ ", bonus: "✚ " }[state] || (n.draft?.origin === "ngram" ? "❝ " : "");
    let label = sign + shown(text);
    if (label.length > 10) label = `${label.slice(0, 9)}…`;
    if (state === "ignored") label = `[${label}]`;
    const group = el("svg:g", { class: `dp-node dp-node-${state}${n.pending ? " dp-node-pending" : ""}`, transform: `translate(${x},${y})` },
      el("svg:rect", { width: CELL.box, height: CELL.tall, rx: n.draft?.origin === "ngram" ? 1 : 6 }),
      el("svg:text", { x: CELL.box / 2, y: CELL.tall / 2 + 1, class: "dp-node-text", text: label }),
      el("svg:text", { x: CELL.box / 2, y: CELL.tall + 9, class: "dp-node-small", text: nodeNote(n) }));
    if (tip) {
      group.addEventListener("pointerenter", () => tip.show(group.getBoundingClientRect(), tipContent(describeNode(n, round))));
      group.addEventListener("pointerleave", () => tip.hide());
    }
    return group;
  }

  function nodeNote(n) {
    if (n.root) return "so far";
    if (n.target) return `target ${percent(n.prob)}`;
    const target = isNumber(n.draft.targetProb) && n.state !== "waiting" && n.pending ? ` → ${percent(n.draft.targetProb)}` : "";
    return percent(n.draft.prob) + target;
  }

  function describeNode(n, round) {
    if (n.root) return [`So far … ${quoted(n.text)}`, "The last token of the answer before this round.", []];
    if (n.target) return [`${KINDS[n.state]} ${quoted(n.text)}`, n.state === "bonus" ? "Everything tested was accepted: one more from the target." : "The target’s own token.", [["target’s probability", percent(n.prob)]]];
    const words = {
      accepted: n.pending ? "Tested, and the target chose the same." : "Not tested, but the target arrived here: prefetched outcome.",
      rejected: "Tested: the target chose another token here.", ignored: "Never reached: an earlier token was rejected, or another branch won.",
      waiting: n.pending ? "Tested, and kept." : "Drafted while the GPU was busy; waits for the next round.",
    }[n.state];
    const facts = [["draft’s probability", percent(n.draft.prob)], ["expected to be reached", percent(n.draft.reach)], ["choice", `${n.draft.rank}.`], ["from", origin(n.draft)], ["drafted in round", `${n.draft.born + 1}`]];
    if (n.pending && isNumber(n.draft.targetProb)) facts.splice(1, 0, ["target’s probability", percent(n.draft.targetProb)]);
    return [`${KINDS[n.state]} ${quoted(n.draft.text)}`, words, facts];
  }

  /* ---------- the whole picture ---------- */

  /** Colours for the canvas, resolved from the style sheet, so that themes and forced colours reach it. */
  function readInk(host) {
    const probe = el("span", { hidden: true });
    host.append(probe);
    const colour = (name) => { probe.style.color = `var(--dp-${name})`; return getComputedStyle(probe).color; };
    const ink = { font: getComputedStyle(host).fontFamily };
    for (const name of ["text", "soft", "line", "track", "paper", "cpu", "cpu-soft", "gpu", "on-gpu", "prefill", "budget"]) {
      ink[name.replace(/-(\w)/g, (_, letter) => letter.toUpperCase())] = colour(name);
    }
    probe.remove();
    ink.hatch = hatch(ink);
    return ink;
  }

  function hatch(ink) {
    const tile = el("canvas", { width: 6, height: 6 });
    const pen = tile.getContext("2d");
    pen.fillStyle = ink.cpuSoft;
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = ink.cpu;
    pen.lineWidth = 1.6;
    pen.beginPath();
    for (const x of [-6, 0, 6]) { pen.moveTo(x, 6); pen.lineTo(x + 6, 0); }
    pen.stroke();
    return pen.createPattern(tile, "repeat");
  }

  const LEGEND = [
    ["accepted", "accepted", "drafted on the CPU, chosen by the target too"], ["correction", "correction", "the target’s token after a rejection"],
    ["bonus", "bonus", "the target’s token after full acceptance"], ["plain", "plain", "the target alone"],
    ["ghost", "waiting", "drafted, waiting for the target"], ["chip", "discarded", "rejected and ignored, unfold with the pointer or the keyboard"],
  ];

  function legend() {
    return el("p", { class: "dp-legend", "aria-label": "Legend" }, ...LEGEND.map(([kind, name, hint]) => {
      if (kind === "chip") return el("span", { title: hint }, el("span", { class: "dp-chip", data: { n: "·3" } }), ` ${name}`);
      if (kind === "ghost") return el("span", { class: "dp-ghost", title: hint, data: { text: name } });
      return el("span", { class: `dp-t dp-${kind}`, title: hint, text: name });
    }));
  }

  class Picture {
    /** parts: which of "head", "gauges", "ribbon", "legend", "lanes", "tree" to draw. */
    constructor(element, parts = ["head", "gauges", "ribbon", "legend", "lanes", "tree"]) {
      this.model = new Model();
      this.selected = -1;
      this.done = {};
      this.cost = 0;
      this.drawn = 0;
      this.root = el("section", { class: "dp", "aria-label": "Live picture" });
      element.replaceChildren(this.root);
      this.tip = new Tip(this.root);
      this.badge = el("span", { class: "dp-badge" });
      this.phase = el("span", { class: "dp-phase" });
      this.polite = el("span", { class: "dp-hidden", "aria-live": "polite" });
      const made = {
        head: () => el("header", { class: "dp-head" }, this.badge, this.phase), gauges: () => (this.gauges = new Gauges(this)).node,
        ribbon: () => (this.ribbon = new Ribbon(this)).node, legend, lanes: () => (this.lanes = new Lanes(this)).node,
        tree: () => (this.tree = new Tree(this)).node,
      };
      this.root.append(...parts.map((part) => made[part]()), this.polite);
      this.watch();
    }

    /** Themes, sizes and forced colours change the ink. */
    watch() {
      const restyle = () => { this.ink = null; this.wake(); };
      new ResizeObserver(([entry]) => { this.width = entry.contentRect.width; this.wake(); }).observe(this.root);
      for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) matchMedia(query).addEventListener("change", restyle);
      new MutationObserver(restyle).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    }

    /** Take over a frame; false when frames before it are missing. */
    update(frame) {
      const generation = this.model.generation;
      const known = this.model.apply(frame);
      if (generation !== this.model.generation) this.select(-1);
      this.wake();
      return known;
    }

    /** Look at one round in ribbon, lanes and tree; -1 follows the newest. */
    select(round) {
      this.selected = round;
      this.ribbon?.highlight(round);
      this.wake();
    }

    /** Draw at an animation frame, thirty times a second at most; less often where drawing would take a quarter of the time. */
    wake() {
      if (this.asked) return;
      this.asked = true;
      const rest = Math.max(window.duochat?.pace || 30, Math.min(150, 4 * this.cost)) - (performance.now() - this.drawn);
      const draw = () => requestAnimationFrame((now) => { this.asked = false; this.draw(now); });
      if (rest > 16) setTimeout(draw, rest); else draw();
    }

    /** Ribbon and lanes each time; figures and tree less often: nobody reads twenty trees a second. */
    draw(now) {
      if (!this.width) return; // out of sight: drawn when its size changes
      const began = performance.now();
      this.ink = this.ink || readInk(this.root);
      this.ribbon?.draw();
      const moving = this.lanes?.draw(now);
      const seen = `${this.model.generation}/${this.model.n}/${this.selected}`;
      this.seldom("gauges", 200, seen, now, () => { this.gauges?.draw(); this.drawHead(); });
      this.seldom("tree", 400, seen, now, () => this.tree?.draw());
      this.seldom("polite", 5000, seen, now, () => this.speak());
      this.drawn = performance.now();
      this.cost += (this.drawn - began - this.cost) / 8;
      if (moving) this.wake();
    }

    /** Run an action when something is new since it last ran, but not within `every` milliseconds of that. */
    seldom(name, every, seen, now, action) {
      const last = this.done[name] || (this.done[name] = { at: -Infinity, seen: "" });
      if (last.seen === seen) return;
      const rest = this.model.state.finish || this.selected !== last.selected ? 0 : last.at + every - now;
      if (rest <= 0) {
        Object.assign(last, { at: now, seen, selected: this.selected });
        action();
      } else if (!last.timer) last.timer = setTimeout(() => { last.timer = 0; this.wake(); }, rest);
    }

    drawHead() {
      const [state, text] = badge(this.model);
      this.badge.dataset.state = state;
      if (this.badge.textContent !== text) this.badge.textContent = text;
      const { phase, progress, notice, doing, finish } = this.model.state;
      const [done, all] = progress || [];
      const now = { queued: all ? `${plural(done, "request")} before this one` : "", loading: doing, prefill: all ? `${done} of ${all} tokens` : "" }[phase];
      const words = [notice, finish ? `finished: ${finish}` : now].filter(Boolean).join(" · ");
      if (this.phase.textContent !== words) this.phase.textContent = words;
    }

    speak() {
      const g = this.model.gauges;
      if (!g.tokens) return;
      const done = this.model.state.finish ? "Finished. " : "";
      this.polite.textContent = `${done}${g.tokens} tokens, ${fixed(g.rate)} tokens per second, ${percent(g.alpha)} of the tested drafts accepted.`;
    }
  }

  /** Draw a frame (object or JSON text) into element; resync() is called when frames are missing. */
  function duochatPicture(element, value, resync) {
    const frame = typeof value === "string" ? (value.trim().startsWith("{") ? JSON.parse(value) : null) : value;
    const picture = element.duochat || (element.duochat = new Picture(element));
    if (frame && !picture.update(frame)) resync?.(picture.model.n);
    return picture;
  }

  window.duochatPicture = duochatPicture;
  window.DuoChat = { Model, Picture, Ribbon, Lanes, Tree, Tip, Gauges, el, layoutTree, drawTree, legend, lanesKey, shown, quoted, isNumber, fixed, percent, seconds, plural, reason, tipContent, describeToken, reduced };
})();
