/* The live picture of an answer: its parts together, drawn at most once a repaint. No libraries, nothing fetched. */
(() => {
  "use strict";
  const { make, press, fixed, percent, plural, isNumber, remember, recall } = window.duochat;
  const { badge, ended, summary, Answer, Tip, Figures, Ribbon, Lanes, Tree, legend } = window.duochat;

  const MEANING =
    "A small model, the draft, guesses the next words. A large model, the target, checks several guesses in one step and keeps " +
    "those that it would have written itself; at the first wrong one it puts its own word. So the text is the large model’s, " +
    "only the number of its steps changes.";
  const TIES =
    "“Up to near ties”: in 16-bit arithmetic two words that are almost equally likely may change places when a step checks " +
    "more words at once.";

  /** Colours for the canvas, resolved from the style sheet, so that themes and forced colours reach it. */
  function readInk(host) {
    const probe = make("span", { hidden: true });
    host.append(probe);
    const colour = (name) => {
      probe.style.color = `var(--dp-${name})`;
      return getComputedStyle(probe).color;
    };
    const ink = { font: getComputedStyle(host).fontFamily };
    for (const name of [
      "text",
      "soft",
      "line",
      "track",
      "paper",
      "cpu",
      "cpu-soft",
      "gpu",
      "on-gpu",
      "prefill",
      "budget",
    ]) {
      ink[name.replace(/-(\w)/g, (_, letter) => letter.toUpperCase())] = colour(name);
    }
    probe.remove();
    ink.hatch = hatch(ink);
    return ink;
  }

  function hatch(ink) {
    const tile = make("canvas", { width: 6, height: 6 });
    const pen = tile.getContext("2d");
    pen.fillStyle = ink.cpuSoft;
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = ink.cpu;
    pen.lineWidth = 1.6;
    pen.beginPath();
    for (const x of [-6, 0, 6]) {
      pen.moveTo(x, 6);
      pen.lineTo(x + 6, 0);
    }
    pen.stroke();
    return pen.createPattern(tile, "repeat");
  }

  const SHOWN = ["head", "lanes", "legend"];
  const FOLDED = { ribbon: "Token by token", figures: "Figures", tree: "Draft tree" };

  class Picture {
    /** shown, folded: which of "head", "lanes", "legend", "ribbon", "figures" and "tree" to draw, open or on demand. */
    constructor(element, shown = SHOWN, folded = FOLDED) {
      this.answer = new Answer();
      this.machine = {}; // draft, target: devices in words; shares: does the target compute on the CPU; exact: see summary
      this.selected = -1;
      this.glanced = -1;
      this.done = {};
      this.folds = {};
      this.cost = 0;
      this.drawn = 0;
      const whole = shown.includes("head"); // else it is a part of something that has a name
      this.root = whole ? make("section.dp", { "aria-label": "Live picture" }) : make("div.dp");
      element.replaceChildren(this.root);
      this.tip = new Tip(this.root);
      this.polite = make("span.dp-hidden", { "aria-live": "polite" });
      this.root.append(...shown.map((part) => this.made(part)));
      for (const [part, title] of Object.entries(folded)) this.root.append(this.fold(part, title));
      this.root.append(this.polite);
      this.watch();
    }

    made(part) {
      if (part === "head") return this.head();
      if (part === "legend") return (this.legend = legend());
      const kinds = { ribbon: Ribbon, lanes: Lanes, figures: Figures, tree: Tree };
      return (this[part] = new kinds[part](this)).node;
    }

    head() {
      this.badge = make("span.dp-badge");
      this.phase = make("span.dp-phase");
      this.sentence = make("p.dp-sentence");
      this.ties = make("p", { hidden: true }, TIES);
      this.meaning = make(
        "details.dp-meaning",
        {},
        make("summary", {}, "What does this mean?"),
        make("p", {}, MEANING),
        this.ties,
      );
      return make("header.dp-head", {}, make("p.dp-state", {}, this.badge, this.phase), this.sentence, this.meaning);
    }

    /** Open what says in one sentence what a term means; key: of a figure, or "ties". */
    explain(key) {
      const row = key === "ties" ? this.meaning : this.figures?.node.querySelector(`.dp-figure-${key}`);
      if (!row) return;
      if (this.folds.figures && key !== "ties") this.folds.figures.node.open = true;
      row.open = true;
      row.firstElementChild.focus();
      row.scrollIntoView({ block: "nearest" });
    }

    /** A part on demand; the browser remembers which are open. What is folded costs nothing. */
    fold(part, title) {
      const note = make("small");
      const node = make(
        "details.dp-fold",
        { open: recall(`fold.${part}`) === "open" },
        make("summary", {}, make("b", {}, title), note),
        this.made(part),
      );
      node.addEventListener("toggle", () => {
        remember(`fold.${part}`, node.open ? "open" : "");
        this.done = {};
        this.wake();
      });
      this.folds[part] = { node, note };
      return node;
    }

    /** Is this part in the picture and not folded? */
    seen(part) {
      return this[part] && this.folds[part]?.node.open !== false;
    }

    /** Themes, sizes and forced colours change the ink. */
    watch() {
      const restyle = () => {
        this.ink = null;
        this.wake();
      };
      new ResizeObserver(([entry]) => {
        this.width = entry.contentRect.width;
        this.wake();
      }).observe(this.root);
      for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"])
        matchMedia(query).addEventListener("change", restyle);
      new MutationObserver(restyle).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    }

    /** Take over a frame; false when frames before it are missing. */
    update(frame) {
      const generation = this.answer.generation;
      const known = this.answer.apply(frame);
      if (generation !== this.answer.generation) this.select(-1);
      this.wake();
      return known;
    }

    /** The round that ribbon, lanes, tree and text show: the one under the pointer, else the chosen one, else -1. */
    get round() {
      return this.glanced >= 0 ? this.glanced : this.selected;
    }

    /** Say what the lanes run on and whether the text is exactly plain decoding's: see `machine`. */
    use(machine) {
      Object.assign(this.machine, machine);
      this.lanes?.describe(this.machine);
      this.done = {};
      this.wake();
    }

    /** Look at one round until another is chosen; -1 follows the newest. */
    select(round) {
      this.selected = round;
      this.glanced = -1;
      if (round >= 0) this.lanes?.reveal(this.answer.rounds[round]);
      this.mark();
    }

    /** Look at one round while the pointer rests on it; -1 when it has left. */
    glance(round) {
      if (round === this.glanced) return;
      this.glanced = round;
      this.mark();
    }

    mark() {
      this.ribbon?.highlight(this.round);
      this.origins?.mark(this.round);
      this.wake();
    }

    /** Draw at a repaint, thirty times a second at most; less often where drawing would take a quarter of the time. */
    wake() {
      if (this.asked) return;
      this.asked = true;
      const rest =
        Math.max(window.duochat?.pace || 30, Math.min(150, 4 * this.cost)) - (performance.now() - this.drawn);
      const draw = () =>
        requestAnimationFrame((now) => {
          this.asked = false;
          this.draw(now);
        });
      if (rest > 16) setTimeout(draw, rest);
      else draw();
    }

    /** Ribbon and lanes each time; figures and tree less often: nobody reads twenty trees a second. */
    draw(now) {
      this.origins?.draw();
      if (!this.width) return; // out of sight: drawn when its size changes
      const began = performance.now();
      this.ink = this.ink || readInk(this.root);
      if (this.seen("ribbon")) this.ribbon.draw();
      const moving = this.lanes?.draw(now);
      this.travel?.draw();
      const state = `${this.answer.generation}/${this.answer.n}/${this.round}`;
      this.seldom("figures", 200, state, now, () => this.drawFigures());
      this.seldom("tree", 400, state, now, () => this.seen("tree") && this.tree.draw());
      this.seldom("polite", 5000, state, now, () => this.speak());
      this.drawn = performance.now();
      this.cost += (this.drawn - began - this.cost) / 8;
      if (moving) this.wake();
    }

    /** Run an action when something is new since it last ran, but not within `every` milliseconds of that. */
    seldom(name, every, state, now, action) {
      const last = this.done[name] || (this.done[name] = { at: -Infinity, state: "" });
      if (last.state === state) return;
      const rest = this.answer.state.finish || this.round !== last.round ? 0 : last.at + every - now;
      if (rest <= 0) {
        Object.assign(last, { at: now, state, round: this.round });
        action();
      } else if (!last.timer)
        last.timer = setTimeout(() => {
          last.timer = 0;
          this.wake();
        }, rest);
    }

    drawFigures() {
      if (this.sentence) this.drawHead();
      if (this.seen("figures")) this.figures.draw();
      const { gauges: g, rounds } = this.answer;
      const notes = {
        ribbon: g.tokens ? plural(g.tokens, "token") : "",
        figures: isNumber(g.alpha) ? `${percent(g.alpha)} of the tested guesses were right` : "",
        tree: rounds.length
          ? `round ${(this.round >= 0 ? this.round : rounds.length - 1) + 1} of ${rounds.length}`
          : "",
      };
      for (const [part, { note }] of Object.entries(this.folds)) write(note, notes[part]);
    }

    drawHead() {
      const [state, words] = badge(this.answer);
      this.badge.dataset.state = state;
      write(this.badge, words);
      write(this.phase, this.progress());
      const clauses = summary(this.answer, this.machine.exact);
      this.ties.hidden = this.machine.exact !== false;
      const said = clauses.map(([, ...words]) => words).join();
      if (this.said !== said) {
        this.said = said;
        const pieces = clauses.map((clause, i) => [i ? ", " : "", ...this.clause(...clause)]);
        this.sentence.replaceChildren(...pieces.flat());
      }
      this.sentence.querySelectorAll("b").forEach((b, i) => write(b, clauses[i][0] && `${clauses[i][0]} `));
    }

    clause(_number, term, words, key) {
      return [make("b"), term && press(term, () => this.explain(key), ".dp-term"), words].filter(Boolean);
    }

    progress() {
      const { phase, progress, notice, doing, finish } = this.answer.state;
      const [done, all] = progress || [];
      const now = {
        queued: all ? `${plural(done, "answer")} before this one` : "",
        loading: doing,
        prefill: all ? `${done} of ${all} tokens` : "",
      };
      return [notice, ["length", "cancelled"].includes(finish) ? ended(finish) : now[phase]].filter(Boolean).join(" · ");
    }

    speak() {
      const g = this.answer.gauges;
      if (!g.tokens) return;
      const { finish } = this.answer.state;
      this.polite.textContent = `${finish ? `Answer ${ended(finish)}: ` : ""}${g.tokens} tokens, ${fixed(g.rate)} tokens per second, ${percent(g.alpha)} of the tested guesses accepted.`;
    }
  }

  /** Touch the document only when the words are new. */
  function write(node, words = "") {
    if (node.textContent !== words) node.textContent = words;
  }

  /** Draw a frame (object or JSON text) into element; resync() is called when frames are missing. */
  function drawPicture(element, value, resync) {
    const frame = typeof value === "string" ? (value.trim().startsWith("{") ? JSON.parse(value) : null) : value;
    const picture = element.duochat || (element.duochat = new Picture(element));
    if (frame && !picture.update(frame)) resync?.(picture.answer.n);
    return picture;
  }

  Object.assign(window.duochat, { Picture, drawPicture });
})();
