/* The Learn tab: chapters over one recorded answer. learn.py gives the facts and the words, this file shows them. */
(() => {
  "use strict";
  const { Picture, Model, el, drawTree, layoutTree, fixed, percent, seconds, shown, quoted, isNumber, plural } = window.DuoChat;
  const SCHEDULES = [["plain", "Plain decoding"], ["sequential", "In turns"], ["chain", "In parallel (the paper)"], ["prefetch", "With outcome prefetch"]];

  /** A paragraph; **bold** is the only markup. */
  const paragraph = (text) => el("p", {}, ...text.split("**").map((piece, i) => (i % 2 ? el("b", { text: piece }) : piece)));
  const button = (text, onclick, props = {}) => el("button", { type: "button", class: "dp-button", text, ...props, on: { click: onclick } });

  class Learn {
    constructor(element, { server }) {
      this.server = server;
      this.status = el("p", { class: "dpr-status", role: "status" });
      this.source = el("div", { class: "dpl-source" });
      this.nav = el("nav", { class: "dpl-nav", "aria-label": "Chapters" });
      this.body = el("article", { class: "dpl-body", tabindex: "-1" });
      element.replaceChildren(el("div", { class: "dp-tab" },
        el("header", { class: "dp-intro" }, el("h2", { text: "Learn" }), el("p", { text: "How a small model on the CPU and a large one on the GPU write one text together, faster than the large one alone and word for word the same. Shown on a recorded answer, or on your own prompt." })),
        el("section", { class: "dp dpl" }, this.source, this.status, this.nav, this.body)));
      this.build();
    }

    async build() {
      const { recorded = [] } = await this.server.recorded({});
      this.choice = el("select", { "aria-label": "Recorded answer", on: { change: () => this.load(this.choice.value) } }, ...recorded.map((name) => el("option", { value: name, text: name.replace(/[-_]/g, " ") })));
      this.prompt = el("input", { type: "text", placeholder: "… or your own prompt, answered by the loaded models", "aria-label": "Your own prompt", maxlength: 2000 });
      const own = el("form", { class: "dpl-own", on: { submit: (e) => { e.preventDefault(); this.own(); } } }, this.prompt, el("button", { type: "submit", class: "dp-button", text: "Use it" }));
      this.source.append(el("label", {}, el("span", { text: "Recorded answer" }), this.choice), own);
      if (recorded.length) await this.load(recorded[0]);
    }

    say(words, bad = false) {
      this.status.textContent = words;
      this.status.classList.toggle("dpr-bad", bad);
    }

    async load(name) {
      const lesson = await this.server.lesson({ name });
      if (lesson.refused) return this.say(lesson.refused, true);
      return this.open(lesson);
    }

    async own() {
      const answer = await this.server.own({ prompt: this.prompt.value });
      if (answer.refused) return this.say(answer.refused, true);
      for (;;) {
        const at = await this.server.progress({ ticket: answer.ticket });
        if (at.refused || at.error) return this.say(at.refused || at.error, true);
        if (at.result) return this.open(at.result);
        this.say(at.note.tokens ? `The models answer: ${at.note.tokens} of up to ${at.note.of} tokens …` : "The models read the prompt …");
        await new Promise((resolve) => setTimeout(resolve, 300));
      }
    }

    open(lesson) {
      this.lesson = lesson;
      this.model = new Model();
      this.model.apply(lesson.frame);
      this.round = Math.max(0, lesson.rounds.findIndex((r) => r.tested > 3));
      this.predictions = new Map();
      this.answers = new Map();
      const { tokens, rounds } = lesson.frame.gauges;
      this.say(`“${lesson.prompt}”: ${tokens} tokens in ${rounds} rounds with ${lesson.decoder}${lesson.device ? `, ${lesson.device}` : ""}.`);
      this.nav.replaceChildren(...lesson.chapters.map((chapter, i) => button(`${i + 1}. ${chapter.title}`, () => this.go(i), { class: "dpl-chapter" })));
      this.go(0);
    }

    go(index) {
      this.chapter = index;
      const { chapters } = this.lesson;
      const chapter = chapters[index];
      [...this.nav.children].forEach((node, i) => (i === index ? node.setAttribute("aria-current", "step") : node.removeAttribute("aria-current")));
      const turn = el("footer", { class: "dpl-turn" },
        index ? button(`‹ ${chapters[index - 1].title}`, () => this.go(index - 1)) : el("span"),
        index + 1 < chapters.length ? button(`${chapters[index + 1].title} ›`, () => this.go(index + 1), { class: "dp-button dp-primary" }) : el("span"));
      this.stage = el("div", { class: "dpl-stage" });
      this.body.replaceChildren(el("h3", { text: chapter.title }), ...chapter.text.map(paragraph), this.stage, turn);
      this[`show_${chapter.id}`]?.();
    }

    /* ---------- chapters ---------- */

    show_idea() {
      const sample = (kind, name) => (kind === "chip" ? el("span", { class: "dp-chip", data: { n: "·3" } }) : kind === "ghost" ? el("span", { class: "dp-ghost", data: { text: name } }) : el("span", { class: `dp-t dp-${kind}`, text: name }));
      this.stage.append(timelines(this.lesson.costs), el("h4", { text: "What each colour means" }),
        el("dl", { class: "dpl-colours" }, ...this.lesson.colours.flatMap(([kind, name, words]) => [el("dt", {}, sample(kind, name)), el("dd", { text: words })])));
    }

    show_rounds() {
      this.stepper = el("div", { class: "dpl-stepper" });
      this.round_ = el("div", { class: "dpl-round" });
      const lanes = el("div", { class: "dpl-lanes" });
      this.stage.append(this.stepper, this.round_, lanes);
      this.lanes = new Picture(lanes, ["lanes"]);
      this.showRound(this.round);
    }

    showRound(index) {
      const last = this.lesson.rounds.length - 1;
      this.round = Math.min(Math.max(index, 0), last);
      const tested = (from, by) => { for (let i = from; i >= 0 && i <= last; i += by) if (this.lesson.rounds[i].tested) return i; return this.round; };
      this.stepper.replaceChildren(button("‹", () => this.showRound(tested(this.round - 1, -1)), { "aria-label": "round before" }),
        el("b", { text: `Round ${this.round + 1} of ${last + 1}` }), button("›", () => this.showRound(tested(this.round + 1, 1)), { "aria-label": "next round" }),
        el("small", { text: this.score() }));
      this.drawRound();
      const seen = this.round + (this.predictions.get(this.round).revealed ? 1 : 0);
      this.lanes.update({ from: 0, n: seen, rounds: this.lesson.frame.rounds.slice(0, seen), state: {} });
    }

    score() {
      const done = [...this.predictions.values()].filter((p) => p.revealed);
      const right = done.reduce((sum, p) => sum + p.right, 0);
      return done.length ? `You predicted ${right} of ${done.reduce((sum, p) => sum + p.of, 0)} rightly so far.` : "";
    }

    drawRound() {
      const round = this.model.rounds[this.round];
      const told = this.lesson.rounds[this.round];
      const guess = this.predictions.get(this.round) || { picked: new Set(), revealed: !told.tested };
      this.predictions.set(this.round, guess);
      const before = this.model.tokens.slice(Math.max(0, round.first - 24), round.first).map((t) => t.text).join("");
      this.round_.replaceChildren(
        el("p", { class: "dpl-before" }, el("span", { class: "dpl-dim", text: round.first > 24 ? "…" : "" }), before || "(the answer begins)", el("span", { class: "dpl-cursor", "aria-hidden": "true" })),
        guess.revealed ? this.revealed(round, told, guess) : this.asking(round, guess));
    }

    /** Before the reveal: the tested tokens as buttons, in the order of the tree. */
    asking(round, guess) {
      const tree = layoutTree(this.model, this.round);
      const nodes = tree.nodes.filter((n) => n.root || n.pending);
      for (const n of nodes) n.state = n.root ? n.state : "waiting";
      const rows = [...new Set(nodes.map((n) => n.row))].sort((a, b) => a - b);
      for (const n of nodes) n.row = rows.indexOf(n.row);
      const svg = drawTree({ nodes, columns: tree.columns, rows: rows.length }, round, null);
      const groups = [...svg.querySelectorAll(".dp-node")];
      nodes.forEach((n, i) => { if (!n.root) this.pickable(groups[i], n, guess); });
      svg.removeAttribute("aria-hidden");
      return el("div", {}, el("p", { text: `The target tests ${plural(round.pending.length, "drafted token")} in one forward. Click those that you think it will accept (a token only counts if the one before it is accepted).` }),
        el("div", { class: "dp-tree-scroll dpl-pick" }, svg),
        el("div", { class: "dpl-row" }, button("Reveal", () => this.reveal(round, guess), { class: "dp-button dp-primary" })));
    }

    pickable(group, node, guess) {
      const id = node.draft.id;
      const draw = () => { group.classList.toggle("dpl-picked", guess.picked.has(id)); group.setAttribute("aria-pressed", `${guess.picked.has(id)}`); };
      const toggle = () => { if (!guess.picked.delete(id)) guess.picked.add(id); draw(); };
      for (const [key, value] of [["tabindex", "0"], ["role", "button"], ["aria-label", `${quoted(node.draft.text)}, draft ${percent(node.draft.prob)}`]]) group.setAttribute(key, value);
      group.addEventListener("click", toggle);
      group.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); toggle(); } });
      draw();
    }

    reveal(round, guess) {
      const accepted = new Set(round.accepted);
      guess.of = round.pending.length;
      guess.right = round.pending.filter(([id]) => accepted.has(id) === guess.picked.has(id)).length;
      guess.revealed = true;
      this.showRound(this.round);
    }

    revealed(round, told, guess) {
      const words = guess.of ? `Your prediction was right for ${guess.right} of ${guess.of}. ` : "";
      return el("div", { class: "dpl-revealed" }, el("p", {}, el("b", { text: words }), told.summary),
        el("div", { class: "dp-tree-scroll" }, drawTree(layoutTree(this.model, this.round), round, this.lanes.tip)),
        el("ol", { class: "dpl-places" }, ...told.places.map((place) => placeCard(place))));
    }

    show_exact() {
      const index = this.lesson.rounds.findIndex((r, i) => i >= 1 && r.places.length > 2 && r.places.some((p) => p.kind === "correction"));
      const round = this.lesson.rounds[Math.max(0, index)];
      const noisy = round.places.some((p) => p.bars.some((b) => isNumber(b.noise)));
      const had = (place) => place.bars.filter((b) => isNumber(b.draft)).map((b) => shown(b.text)).join(" or ") || "nothing";
      const outcome = { accepted: "same: kept, go on", correction: "other: the target’s is written, the rest thrown away", bonus: "nothing drafted here: the target’s is written", plain: "the target’s is written" };
      this.stage.append(el("h4", { text: `Round ${round.index + 1}, place by place` }), el("div", { class: "dpl-wide" }, el("table", {},
        el("thead", {}, el("tr", {}, ...["the target’s own choice", "the draft had", "so"].map((t) => el("th", { scope: "col", text: t })))),
        el("tbody", {}, ...round.places.map((place) => el("tr", {}, el("td", {}, el("span", { class: `dp-t dp-${place.kind}`, text: shown(place.text) })), el("td", { text: had(place) }), el("td", { text: outcome[place.kind] })))))),
      el("p", { text: "Read the first column downwards: that is the text. The second column decides only how many rows one forward may fill." }));
      if (noisy) this.stage.append(el("p", { text: "This answer was drawn with a temperature: the bars in “Round by round” also show the noise that both models share." }));
      this.stage.append(el("p", { class: "dpl-dim", text: "One honest limit: in 16-bit arithmetic a forward of another width may round differently, and a near tie between two tokens may fall the other way. The Race tab compares both texts and shows the first difference, if there is one." }));
    }

    show_budget() {
      const { costs, arithmetic } = this.lesson;
      const figure = el("div", { class: "dpl-budget" });
      const show = (row) => {
        figure.replaceChildren(budgetFigure(row, costs.target));
        buttons.forEach((b, i) => b.setAttribute("aria-pressed", `${arithmetic[i] === row}`));
      };
      const buttons = arithmetic.map((row) => button(row.factor === 1 ? "the answer's machine" : `GPU ${row.factor}× as fast`, () => show(row)));
      this.stage.append(el("div", { class: "dpl-row", role: "group", "aria-label": "Speed of the GPU" }, ...buttons), figure, el("p", { class: "dpl-dim", text: `T_target and T_draft: ${costs.source}.` }));
      show(arithmetic[0]);
    }

    show_pays() { new Panel(this.stage, this.server, this.lesson); }

    async show_branches() {
      const { rounds } = this.model;
      const ahead = (r) => r.accepted.some((id) => !r.pending.some(([p]) => p === id));
      const first = [(r) => ahead(r) && r.pending.length > 1, ahead].map((test) => rounds.findIndex(test)).find((i) => i > 0);
      const index = first || rounds.reduce((best, r, i) => (r.tree.length > rounds[best].tree.length ? i : best), 0);
      this.stage.append(el("h4", { text: ahead(rounds[index]) ? `Round ${index + 1}: the outcome was already in the tree` : `Round ${index + 1}: the widest tree of this answer` }),
        el("div", { class: "dp-tree-scroll" }, drawTree(layoutTree(this.model, index), rounds[index], null)), el("p", { text: this.lesson.rounds[index].places.map((p) => p.why).pop() || "" }));
      this.stage.append(el("h4", { text: "What they buy, predicted" }), el("div", { class: "dpl-wide" }, await this.buys()));
    }

    /** Predicted speedups of both ideas: on the machine of the answer, and where the target is large beside the draft. */
    async buys() {
      const { costs, measured } = this.lesson;
      const cases = [[`the answer's machine (γ* ${fixed(costs.budget)}, α ${percent(measured.alpha ?? 0.7)})`, { c: costs.c, alpha: measured.alpha ?? 0.7 }], ["a large target, hard text (γ* 24, α 50 %)", { c: 1 / 24, alpha: 0.5 }]];
      const rows = [1, 2, 4].map((k) => [`the paper’s schedule, ${plural(k, "sequence")}`, { k }, (answer) => answer.now.chain])
        .concat([0.5, 0.8, 1].map((hits) => [`outcome prefetch, ready in ${percent(hits)} of the cases`, { hits }, (answer) => answer.best.prefetch[1]]));
      const cell = async ([, base], [, change, pick]) => el("td", { text: `${fixed(pick(await this.server.predict({ ...base, gamma: 1 / base.c, ...change })), 2)}×` });
      const body = await Promise.all(rows.map(async (row) => el("tr", {}, el("th", { scope: "row", text: row[0] }), ...(await Promise.all(cases.map((base) => cell(base, row)))))));
      return el("table", { class: "dpl-buys" }, el("thead", {}, el("tr", {}, el("td"), ...cases.map(([name]) => el("th", { scope: "col", text: name })))), el("tbody", {}, ...body));
    }

    show_exercises() {
      this.stage.append(el("ol", { class: "dpl-questions" }, ...this.lesson.questions.map((q, i) => this.question(q, i))));
      this.tally();
    }

    question(q, index) {
      const verdict = el("p", { class: "dpl-verdict", role: "status" });
      const answer = (given, right) => {
        this.answers.set(index, right);
        verdict.textContent = `${right ? "✓ Right." : "✗ Not quite."} ${right || q.kind === "number" ? q.because : "Try again."}`;
        verdict.dataset.right = right;
        this.tally();
      };
      const fields = q.kind === "choice"
        ? q.options.map((option, i) => el("label", { class: "dpl-option" }, el("input", { type: "radio", name: `dpl-q${index}`, on: { change: () => answer(i, i === q.right) } }), option))
        : [this.numberField(q, answer)];
      return el("li", {}, el("p", { text: q.ask }), ...fields, verdict);
    }

    numberField(q, answer) {
      const input = el("input", { type: "number", step: "any", "aria-label": q.ask });
      const check = () => input.value !== "" && answer(input.value, Math.abs(Number(input.value) - q.right) <= q.slack + 1e-9);
      return el("form", { class: "dpl-number", on: { submit: (e) => { e.preventDefault(); check(); } } }, input, el("span", { text: q.unit }), el("button", { type: "submit", class: "dp-button", text: "Check" }));
    }

    tally() {
      const right = [...this.answers.values()].filter(Boolean).length;
      this.say(`${right} of ${this.lesson.questions.length} exercises solved.`);
    }

    show_words() {
      this.stage.append(el("dl", { class: "dpl-words" }, ...Object.entries(this.lesson.glossary).flatMap(([word, words]) => [el("dt", { text: word }), el("dd", { text: words })])));
    }
  }

  /** One place of a round: why its token stands there, and draft against target as paired bars. */
  function placeCard(place) {
    const scale = (x) => (isNumber(x) ? Math.max(0.01, x).toFixed(3) : "0");
    const pair = (bar) => {
      const draft = el("i", { class: "dpl-bar dpl-bar-draft" });
      const target = el("i", { class: "dpl-bar dpl-bar-target" });
      draft.style.setProperty("--v", scale(bar.draft));
      target.style.setProperty("--v", scale(bar.target));
      return el("tr", { class: bar.chosen ? "dpl-chosen" : "" }, el("th", { scope: "row" }, el("code", { text: shown(bar.text) }), bar.chosen ? el("small", { text: " ◀ the target’s" }) : null),
        el("td", {}, draft, el("small", { text: isNumber(bar.draft) ? percent(bar.draft) : "not drafted" })),
        el("td", {}, target, el("small", { text: isNumber(bar.target) ? percent(bar.target) : "not asked" })),
        isNumber(bar.noise) ? el("td", {}, el("small", { text: `noise ${bar.noise > 0 ? "+" : ""}${fixed(bar.noise, 2)}` })) : null);
    };
    return el("li", { class: "dpl-place" }, el("p", {}, el("span", { class: `dp-t dp-${place.kind}`, text: shown(place.text) }), ` ${place.why}`),
      el("table", { class: "dpl-bars" }, el("thead", {}, el("tr", {}, el("td"), el("th", { scope: "col", text: "draft" }), el("th", { scope: "col", text: "target" }))), el("tbody", {}, ...place.bars.map(pair))));
  }

  /* ---------- figures ---------- */

  /** Three ways to spend the same time: alone, in turns, at once. Block lengths follow the measured costs. */
  function timelines(costs) {
    const forward = 120;
    const each = Math.max(4, Math.min(forward / 2, forward * costs.c));
    const many = Math.max(1, Math.min(8, Math.floor(forward / each)));
    const total = 3 * forward + 3 * 4 * each;
    const strip = (name, note, cpu, gpu) => el("div", { class: "dpl-strip" }, el("b", { text: name }), lane("CPU", "cpu", cpu, total), lane("GPU", "gpu", gpu, total), el("small", { text: note }));
    const turn = 4 * each + forward;
    const rows = (n, make) => Array.from({ length: n }, (_, i) => make(i)).flat();
    const count = (length) => Math.floor(total / length);
    return el("div", { class: "dpl-strips" },
      strip("The target alone", "one token a forward; the CPU idles", [], rows(count(forward), (i) => [[i * forward, forward]])),
      strip("In turns", "several tokens a forward, but always one device waits", rows(count(turn), (i) => rows(4, (j) => [[i * turn + j * each, each]])), rows(count(turn), (i) => [[i * turn + 4 * each, forward]])),
      strip("At once", "the CPU drafts what the next forward tests", rows(count(forward), (i) => rows(many, (j) => [[i * forward + j * each, each]])), rows(count(forward), (i) => [[i * forward, forward]])));
  }

  function lane(name, kind, blocks, total) {
    const track = el("span", { class: "dpl-track" }, ...blocks.map(([start, length]) => {
      const block = el("i", { class: `dpl-block dp-swatch-${kind}` });
      block.style.left = `${(100 * start) / total}%`;
      block.style.width = `calc(${(100 * length) / total}% - 1px)`;
      return block;
    }));
    return el("span", { class: "dpl-lane" }, el("em", { text: name }), track);
  }

  /** One forward, and the drafted tokens that fit beside it. longest: seconds that fill the width. */
  function budgetFigure({ target, draft, budget }, longest) {
    const fit = Math.floor(budget + 1e-9);
    const blocks = Array.from({ length: Math.min(fit + 1, 200) }, (_, i) => [i * draft, draft]);
    const total = Math.max(longest, draft * (fit + 1)) * 1.02;
    const drawn = lane("CPU", "cpu", blocks.slice(0, fit), total);
    if (blocks[fit]) {
      const late = el("i", { class: "dpl-block dpl-late" });
      late.style.left = `${(100 * blocks[fit][0]) / total}%`;
      late.style.width = `${(100 * draft) / total}%`;
      drawn.lastChild.append(late);
    }
    return el("div", {}, lane("GPU", "gpu", [[0, target]], total), drawn,
      el("p", { class: "dpl-formula" }, "γ* = T_target / T_draft = ", el("b", { text: seconds(target) }), " / ", el("b", { text: seconds(draft) }), " = ", el("b", { class: "dpl-big", text: `${fixed(budget)} tokens` })));
  }

  /* ---------- what if ---------- */

  const SLIDERS = [
    ["c", "c = T_draft / T_target", -2.3, 0, 0.01, (x) => 10 ** x, (c) => Math.log10(c), (c) => `${fixed(c, 3)} (γ* ${fixed(1 / c)})`],
    ["alpha", "α, acceptance", 0, 0.99, 0.01, (x) => x, (x) => x, percent],
    ["gamma", "γ, drafted a round", 1, 40, 1, (x) => x, (x) => x, (x) => `${x}`],
    ["k", "k, sequences (paper)", 1, 8, 1, (x) => x, (x) => x, (x) => `${x}`],
    ["hits", "h, outcomes prefetched", 0, 1, 0.05, (x) => x, (x) => x, percent],
    ["widen", "w, cost of each verified token", 0, 0.3, 0.005, (x) => x, (x) => x, percent],
  ];

  class Panel {
    constructor(stage, server, lesson) {
      Object.assign(this, { server, lesson });
      const { costs, measured } = lesson;
      this.values = { c: costs.c, alpha: measured.alpha ?? 0.7, gamma: Math.max(1, Math.round(costs.budget)), k: 1, hits: 0.8, widen: 0 };
      this.outputs = {};
      this.inputs = {};
      const sliders = SLIDERS.map((slider) => this.slider(...slider));
      this.bars = el("div", { class: "dpl-rates", role: "status" });
      this.chart = el("div", { class: "dpl-chart" });
      const here = button("this answer, its machine", () => this.set({ c: costs.c, alpha: measured.alpha ?? 0.7, gamma: Math.max(1, Math.round(costs.budget)), k: 1, hits: measured.hits ?? 0.8, widen: costs.widen }));
      const big = button("a fast GPU (c = 1/8)", () => this.set({ c: 0.125, alpha: 0.7, gamma: 8, k: 1, hits: 0.8, widen: 0 }));
      const huge = button("a large target (c = 1/24)", () => this.set({ c: 1 / 24, alpha: 0.8, gamma: 14, k: 1, hits: 0.8, widen: 0 }));
      const bad = button("a bad draft (α = 0.2, c = 0.3)", () => this.set({ c: 0.3, alpha: 0.2, gamma: 3, k: 1, hits: 0.5, widen: 0.05 }));
      stage.append(el("div", { class: "dpl-row", role: "group", "aria-label": "Settings to start from" }, here, big, huge, bad),
        el("div", { class: "dpl-panel" }, el("div", { class: "dpl-sliders" }, ...sliders), el("div", {}, this.bars, this.chart)), this.formulas(lesson.formulas));
      this.ask();
    }

    slider(name, label, min, max, step, from, to, say) {
      const input = el("input", { type: "range", min, max, step, on: { input: () => { this.values[name] = from(Number(input.value)); this.label(name); this.ask(); } } });
      input.value = to(this.values[name]);
      this.outputs[name] = el("output");
      this.inputs[name] = { input, to, say };
      this.label(name);
      return el("label", {}, el("span", {}, label, " ", this.outputs[name]), input);
    }

    label(name) { this.outputs[name].textContent = this.inputs[name].say(this.values[name]); }

    set(values) {
      Object.assign(this.values, values);
      for (const [name, { input, to }] of Object.entries(this.inputs)) { input.value = to(this.values[name]); this.label(name); }
      this.ask();
    }

    /** Ask the server, one question at a time; the latest sliders win. */
    async ask() {
      if (this.asking) { this.again = true; return; }
      this.asking = true;
      const answer = await this.server.predict({ ...this.values });
      this.asking = false;
      if (!answer.refused) this.draw(answer);
      if (this.again) { this.again = false; this.ask(); }
    }

    draw(answer) {
      const { measured, costs } = this.lesson;
      const top = Math.max(2, ...Object.values(answer.now), measured.speedup || 0) * 1.05;
      const bar = ([name, title]) => {
        const rate = answer.now[name];
        const fill = el("i", { class: `dpl-rate dpl-rate-${name}` });
        fill.style.setProperty("--v", (rate / top).toFixed(4));
        const best = answer.best[name];
        const note = best ? `best ${fixed(best[1], 2)}× at γ = ${best[0]}` : `${fixed(1 / costs.target)} tok/s here`;
        return el("div", { class: rate < 1 ? "dpl-slower" : "" }, el("span", { text: title }), fill, el("b", { text: `${fixed(rate, 2)}×${rate < 1 ? " slower" : ""}` }), el("small", { text: note }));
      };
      this.bars.replaceChildren(...SCHEDULES.map(bar));
      this.chart.replaceChildren(chart(answer, measured));
    }

    formulas(formulas) {
      return el("details", { class: "dp-table", open: true }, el("summary", { text: "The formulas" }),
        el("dl", { class: "dpl-formulas" }, ...Object.values(formulas).flatMap(([name, formula, words]) => [el("dt", { text: name }), el("dd", {}, el("code", { text: formula }), el("small", { text: words }))])),
        el("p", { class: "dpl-dim", text: "Speedup over plain decoding, tokens per target step. Each verified token makes a forward w longer: 1 becomes 1 + w·γ. Assumed: every drafted token is accepted with the same probability α; each further sequence catches half of what the ones before it missed. Real text is neither, so measured speedups differ." }));
    }
  }

  /** Speedup over γ, one curve a schedule; γ* as a line, the measured answer as a mark. */
  function chart({ gammas, curves, budget, case: now }, measured) {
    const [width, height, left, bottom] = [560, 250, 40, 34];
    const last = gammas[gammas.length - 1];
    const top = Math.max(1.5, measured.speedup || 0, ...Object.values(curves).flat()) * 1.08;
    const x = (g) => left + ((g - 1) / (last - 1)) * (width - left - 14);
    const y = (s) => height - bottom - (s / top) * (height - bottom - 12);
    const svg = el("svg:svg", { viewBox: `0 0 ${width} ${height}`, class: "dpl-svg", role: "img", "aria-label": `Predicted speedup over the draft budget; γ* is ${fixed(budget)}${isNumber(measured.speedup) ? `, measured speedup ${fixed(measured.speedup, 2)}` : ""}` });
    const text = (px, py, words, props = {}) => svg.append(el("svg:text", { x: px, y: py, text: words, ...props }));
    const line = (x1, y1, x2, y2, kind) => svg.append(el("svg:line", { x1, y1, x2, y2, class: kind }));
    for (let s = 0; s <= top; s += top > 4 ? 1 : 0.5) { line(left, y(s), width - 14, y(s), "dpl-grid"); text(left - 6, y(s) + 4, `${s}×`, { "text-anchor": "end" }); }
    for (const g of [1, 5, 10, 15, 20, 25, 30, 35, 40]) text(x(g), height - 16, `${g}`, { "text-anchor": "middle" });
    text((left + width) / 2, height - 2, "γ, tokens drafted a round", { "text-anchor": "middle" });
    line(left, y(1), width - 14, y(1), "dpl-one");
    if (budget <= last) { line(x(Math.max(1, budget)), 12, x(Math.max(1, budget)), height - bottom, "dpl-star"); text(x(Math.max(1, budget)) + 4, 20, `γ* = ${fixed(budget)}`, { class: "dpl-strong" }); }
    line(x(now.gamma), 12, x(now.gamma), height - bottom, "dpl-now");
    for (const [name, values] of Object.entries(curves)) svg.append(el("svg:polyline", { points: values.map((v, i) => `${x(gammas[i])},${y(v)}`).join(" "), class: `dpl-curve dpl-curve-${name}` }));
    if (isNumber(measured.speedup) && isNumber(measured.gamma)) {
      const [px, py] = [x(Math.min(last, Math.max(1, measured.gamma))), y(measured.speedup)];
      svg.append(el("svg:path", { d: `M${px},${py - 7} l7,7 -7,7 -7,-7 z`, class: "dpl-measured" }));
      text(px + 10, py + 4, `measured ${fixed(measured.speedup, 2)}×`, { class: "dpl-strong" });
    }
    return svg;
  }

  (window.duochat = window.duochat || {}).learn = (element, tools) => new Learn(element, tools);
})();
