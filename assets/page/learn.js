/* The Learn tab: chapters over one recorded answer. learn.py gives the facts and the words, this file shows them. */
(() => {
  "use strict";
  const {
    Picture,
    Answer,
    make,
    press,
    table,
    drawTree,
    layoutTree,
    timelines,
    budgetFigure,
    placeCard,
    comparison,
    Forecast,
    whatTheyBuy,
    predicted,
    explain,
    ownQuestions,
    thetaTrial,
    quiz,
    presentation,
    linked,
    linkButton,
    shown,
    isNumber,
    decoderName,
    fixed,
    plural,
  } = window.duochat;

  /** A paragraph; **bold** is the only markup. */
  const paragraph = (text) =>
    make("p", {}, ...text.split("**").map((piece, i) => (i % 2 ? make("b", { text: piece }) : piece)));

  const [CHAT, OWN] = ["chat", ""]; // names of what is no recording that comes along: see learn.py

  const FASTER = [1, 2, 4, 8]; // GPUs to compare the budget with
  /** In the four digits that are shown: what is computed from them is what a reader computes. */
  const digits = (seconds) => Number(seconds.toPrecision(4));

  class Learn {
    constructor(element, { server }) {
      Object.assign(this, { element, server });
      this.status = make("p.dpr-status", { role: "status" });
      this.source = make("summary");
      this.choice = make("select", { "aria-label": "Recorded answer", onchange: () => this.load(this.choice.value) });
      this.prompt = make("input", {
        type: "text",
        placeholder: "A question of your own, answered by the loaded models",
        "aria-label": "Your own prompt",
        maxlength: 2000,
      });
      const own = make(
        "form.dpl-own",
        { onsubmit: (e) => (e.preventDefault(), this.own()) },
        this.prompt,
        make("button.dp-button", { type: "submit", text: "Use it" }),
      );
      this.nav = make("nav.dpl-nav", { "aria-label": "Chapters" });
      this.turn = make("select.dpl-chapters", {
        "aria-label": "Chapter",
        onchange: () => this.go(this.turn.selectedIndex),
      });
      this.body = make("article.dpl-body", { tabindex: "-1" });
      const words =
        "How a small model and a large one write one text together, word for word the large one’s, and when that is faster. Shown on a recorded answer, or on your own prompt.";
      element.replaceChildren(
        make(
          "div.dp-tab",
          {},
          make("header.dp-intro", {}, make("h2", { text: "Learn" }), make("p", { text: words })),
          make(
            "section.dp.dpl",
            {},
            make("details.dpl-source", {}, this.source, make("div", {}, this.choice, own)),
            this.status,
            make("div.dpl-book", {}, this.nav, this.turn, this.body),
          ),
        ),
      );
      this.build();
    }

    async build() {
      const { recorded = [] } = await this.server.recorded({});
      this.said = make("option", { value: CHAT, text: "My last answer in Chat", hidden: true });
      this.choice.append(
        this.said,
        ...recorded.map(([name, title]) => make("option", { value: name, text: title })),
        make("option", { value: OWN, text: "Your own prompt", hidden: true }),
      );
      const follow = () => this.follow(linked("learn"), recorded);
      window.addEventListener("hashchange", () => follow());
      new IntersectionObserver(() => this.look()).observe(this.element);
      if (recorded.length && !follow()) await this.load(recorded[0][0]);
    }

    /** Is there an answer in Chat to learn from? */
    async look() {
      const { said } = await this.server.recorded({ conversation: this.conversation }).catch(() => ({}));
      this.said.hidden = !said;
      if (said) this.said.textContent = `My last answer in Chat: “${said}”`;
    }

    get conversation() {
      return window.duochat.chat_?.conversation || "";
    }

    /** A link opens a chapter with a recorded answer: #learn/chapter/recording. */
    follow([chapter, name] = [], recorded) {
      if (!chapter) return false;
      return (this.load(recorded.some(([known]) => known === name) ? name : recorded[0][0], chapter), true);
    }

    say(words, bad = false) {
      this.status.textContent = words;
      this.status.classList.toggle("dpr-bad", bad);
    }

    /** chapter: the one to open, by its id. */
    async load(name, chapter) {
      const lesson = await this.server.lesson({ name, conversation: this.conversation });
      if (lesson.refused) return this.say(lesson.refused, true);
      return this.open(lesson, chapter);
    }

    async own() {
      const answer = await this.server.own({ prompt: this.prompt.value });
      if (answer.refused) return this.say(answer.refused, true);
      for (;;) {
        const at = await this.server.progress({ ticket: answer.ticket });
        if (at.refused || at.error) return this.say(at.refused || at.error, true);
        if (at.result) return this.open(at.result);
        this.say(
          at.note.tokens
            ? `The models answer: ${at.note.tokens} of up to ${at.note.of} tokens …`
            : "The models read the prompt …",
        );
        await new Promise((resolve) => setTimeout(resolve, 300));
      }
    }

    open(lesson, chapter) {
      this.lesson = lesson;
      this.choice.value = lesson.name;
      this.source.textContent = `Shown on: ${this.choice.selectedOptions[0].textContent}`;
      this.answer = new Answer();
      this.answer.apply(lesson.frame);
      this.rounds = explain(this.answer, lesson.noise);
      this.round = Math.max(
        0,
        this.rounds.findIndex((r) => r.tested > 3),
      );
      this.predictions = new Map();
      this.given = new Map();
      const { tokens, rounds } = lesson.frame.gauges;
      this.say(
        `“${lesson.prompt}”: ${tokens} tokens in ${rounds} rounds with ${decoderName(lesson.decoder)}${lesson.device ? `, ${lesson.device}` : ""}.`,
      );
      this.nav.replaceChildren(
        ...lesson.chapters.map((chapter, i) => press(`${i + 1}. ${chapter.title}`, () => this.go(i), ".dpl-chapter")),
      );
      const all = lesson.chapters.length;
      this.turn.replaceChildren(
        ...lesson.chapters.map(({ title }, i) => make("option", { text: `${i + 1} of ${all}: ${title}` })),
      );
      this.go(
        Math.max(
          0,
          lesson.chapters.findIndex(({ id }) => id === chapter),
        ),
      );
    }

    go(index) {
      this.turn.selectedIndex = index;
      const { chapters, name } = this.lesson;
      const chapter = chapters[index];
      [...this.nav.children].forEach((node, i) =>
        i === index ? node.setAttribute("aria-current", "step") : node.removeAttribute("aria-current"),
      );
      const turn = make(
        "footer.dpl-turn",
        {},
        index ? press(`‹ ${chapters[index - 1].title}`, () => this.go(index - 1)) : make("span"),
        [CHAT, OWN].includes(name) ? make("span") : linkButton("learn", chapter.id, name),
        index + 1 < chapters.length
          ? press(`${chapters[index + 1].title} ›`, () => this.go(index + 1), ".dp-button.dp-primary")
          : make("span"),
      );
      this.stage = make("div.dpl-stage");
      this.body.replaceChildren(make("h3", { text: chapter.title }), ...chapter.text.map(paragraph), this.stage, turn);
      this[`show_${chapter.id}`]?.();
    }

    show_idea() {
      const sample = (kind, name) =>
        kind === "chip"
          ? make("span.dp-chip")
          : kind === "ghost"
            ? make("span.dp-ghost", { data: { text: name } })
            : make(`span.dp-t.dp-${kind}`, { text: name });
      this.stage.append(
        timelines(this.lesson.costs),
        make("h4", { text: "What each colour means" }),
        make(
          "dl.dpl-colours",
          {},
          ...this.lesson.colours.flatMap(([kind, name, words]) => [
            make("dt", {}, sample(kind, name)),
            make("dd", { text: words }),
          ]),
        ),
      );
    }

    show_rounds() {
      this.stepper = make("div.dpl-stepper");
      this.round_ = make("div.dpl-round");
      const lanes = make("div.dpl-lanes");
      this.stage.append(this.stepper, this.round_, lanes);
      this.lanes = new Picture(lanes, ["lanes"], {});
      this.showRound(this.round);
    }

    showRound(index) {
      const last = this.rounds.length - 1;
      this.round = Math.min(Math.max(index, 0), last);
      const tested = (from, by) => {
        for (let i = from; i >= 0 && i <= last; i += by) if (this.rounds[i].tested) return i;
        return this.round;
      };
      this.stepper.replaceChildren(
        press("‹", () => this.showRound(tested(this.round - 1, -1)), ".dp-button", { "aria-label": "round before" }),
        make("b", { text: `Round ${this.round + 1} of ${last + 1}` }),
        press("›", () => this.showRound(tested(this.round + 1, 1)), ".dp-button", { "aria-label": "next round" }),
        make("small", { text: this.score() }),
      );
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
      const round = this.answer.rounds[this.round];
      const told = this.rounds[this.round];
      const guess = this.predictions.get(this.round) || { picked: new Set(), revealed: !told.tested };
      this.predictions.set(this.round, guess);
      const before = this.answer.tokens
        .slice(Math.max(0, round.first - 24), round.first)
        .map((t) => t.text)
        .join("");
      this.round_.replaceChildren(
        make(
          "p.dpl-before",
          {},
          make("span.dpl-dim", { text: round.first > 24 ? "…" : "" }),
          before || "(the answer begins)",
          make("span.dpl-cursor", { "aria-hidden": "true" }),
        ),
        guess.revealed ? this.revealed(round, told, guess) : this.asking(round, guess),
      );
    }

    /** Before the reveal: the tested tokens as buttons, in the order of the tree. */
    asking(round, guess) {
      const tree = layoutTree(this.answer, this.round, { asking: true });
      const svg = drawTree(tree, round, null);
      const groups = [...svg.querySelectorAll(".dp-node")];
      tree.nodes.forEach((n, i) => {
        if (!n.root) this.pickable(groups[i], n, guess);
      });
      svg.removeAttribute("aria-hidden");
      return make(
        "div",
        {},
        make("p", {
          text: `The target verifies ${plural(round.pending.length, "drafted token")} in one forward. Click those that you think it will accept (a token only counts if the one before it is accepted).`,
        }),
        make("div.dp-tree-scroll.dpl-pick", {}, svg),
        make(
          "div.dpl-row",
          {},
          press("Reveal", () => this.reveal(round, guess), ".dp-button.dp-primary"),
        ),
      );
    }

    pickable(group, node, guess) {
      const id = node.draft.id;
      const draw = () => {
        group.classList.toggle("dpl-picked", guess.picked.has(id));
        group.setAttribute("aria-pressed", `${guess.picked.has(id)}`);
      };
      const toggle = () => {
        if (!guess.picked.delete(id)) guess.picked.add(id);
        draw();
      };
      for (const [key, value] of [
        ["tabindex", "0"],
        ["role", "button"],
      ])
        group.setAttribute(key, value);
      group.addEventListener("click", toggle);
      group.addEventListener("keydown", (e) => {
        if (e.key === "Enter" || e.key === " ") {
          e.preventDefault();
          toggle();
        }
      });
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
      return make(
        "div.dpl-revealed",
        {},
        make("p", {}, make("b", { text: words }), told.summary),
        make(
          "div.dp-tree-scroll",
          { tabindex: "0", role: "group", "aria-label": "Draft tree" },
          drawTree(layoutTree(this.answer, this.round), round, this.lanes.tip),
        ),
        make("ol.dpl-places", {}, ...told.places.map((place) => placeCard(place))),
      );
    }

    show_exact() {
      const index = this.rounds.findIndex(
        (r, i) => i >= 1 && r.places.length > 2 && r.places.some((p) => p.kind === "correction"),
      );
      const round = this.rounds[Math.max(0, index)];
      const noisy = round.places.some((p) => p.bars.some((b) => isNumber(b.noise)));
      const had = (place) =>
        place.bars
          .filter((b) => isNumber(b.draft))
          .map((b) => shown(b.text))
          .join(" or ") || "nothing";
      const outcome = {
        accepted: "same: kept, go on",
        correction: "other: the target’s is written, the rest thrown away",
        bonus: "nothing drafted here: the target’s is written",
        plain: "the target’s is written",
      };
      this.stage.append(
        make("h4", { text: `Round ${round.index + 1}, place by place` }),
        make(
          "div.dpl-wide",
          { tabindex: "0", role: "group", "aria-label": "Table" },
          table(
            ["the target’s own choice", "the draft had", "so"],
            round.places.map((place) => [
              make(`span.dp-t.dp-${place.kind}`, { text: shown(place.text) }),
              had(place),
              outcome[place.kind],
            ]),
          ),
        ),
        make("p", {
          text: "Read the first column downwards: that is the text. The second column decides only how many rows one forward may fill.",
        }),
      );
      if (noisy)
        this.stage.append(
          make("p", {
            text: "This answer was drawn with a temperature: the bars in “Round by round” also show the noise that both models share.",
          }),
        );
      this.stage.append(
        make("p.dpl-dim", {
          text: "One honest limit: in 16-bit arithmetic a forward of another width may round differently, and a near tie between two tokens may fall the other way. The Race tab compares both texts and shows the first difference, if there is one.",
        }),
      );
    }

    show_budget() {
      const { costs } = this.lesson;
      const forwards = FASTER.map((factor) => ({ factor, draft: costs.draft, target: digits(costs.target / factor) }));
      const arithmetic = forwards.map((row) => ({ ...row, budget: row.target / row.draft }));
      const figure = make("div.dpl-budget");
      const show = (row) => {
        figure.replaceChildren(budgetFigure(row, costs.target));
        buttons.forEach((b, i) => b.setAttribute("aria-pressed", `${arithmetic[i] === row}`));
      };
      const buttons = arithmetic.map((row) =>
        press(row.factor === 1 ? "the answer's machine" : `GPU ${row.factor}× as fast`, () => show(row)),
      );
      this.stage.append(
        make("div.dpl-row", { role: "group", "aria-label": "Speed of the GPU" }, ...buttons),
        figure,
        make("p.dpl-dim", { text: `T_target and T_draft: ${costs.source}.${this.beside()}` }),
      );
      show(arithmetic[0]);
    }

    /** Why γ* differs in the lanes. */
    beside() {
      const seen = this.answer.rounds.map(({ budget }) => budget).filter(Boolean);
      if (!seen.length) return "";
      const [least, most] = [Math.min(...seen), Math.max(...seen)].map((budget) => fixed(budget));
      return ` In the lanes of “Round by round” γ* follows the lanes’ own times while both run: ${least === most ? least : `${least} to ${most}`} in this answer.`;
    }

    show_pays() {
      new Forecast(this.stage, this.lesson, predicted(this.answer, this.lesson));
    }

    async show_hurts() {
      const place = make("div.dpl-wide", { tabindex: "0", role: "group", "aria-label": "Table" });
      this.stage.append(place);
      const { answers = [] } = await this.server.compared({});
      place.append(comparison(answers, (name) => this.load(name, "rounds")));
    }

    show_branches() {
      const { rounds } = this.answer;
      const ahead = (r) => r.accepted.some((id) => !r.pending.some(([p]) => p === id));
      const first = [(r) => ahead(r) && r.pending.length > 1, ahead]
        .map((test) => rounds.findIndex(test))
        .find((i) => i > 0);
      const index = first || rounds.reduce((best, r, i) => (r.tree.length > rounds[best].tree.length ? i : best), 0);
      this.stage.append(
        make("h4", {
          text: ahead(rounds[index])
            ? `Round ${index + 1}: the outcome was already in the tree`
            : `Round ${index + 1}: the widest tree of this answer`,
        }),
        make(
          "div.dp-tree-scroll",
          { tabindex: "0", role: "group", "aria-label": "Draft tree" },
          drawTree(layoutTree(this.answer, index), rounds[index], null),
        ),
        make("p", { text: this.rounds[index].places.map((p) => p.why).pop() || "" }),
      );
      const theta = thetaTrial(this.answer);
      if (theta) this.stage.append(make("h4", {}, "θ, tried by hand"), theta);
      this.stage.append(
        make("h4", { text: "What they buy, predicted, each at its best γ" }),
        make(
          "div.dpl-wide",
          { tabindex: "0", role: "group", "aria-label": "Table" },
          whatTheyBuy(this.lesson),
        ),
      );
    }

    show_exercises() {
      const questions = [...ownQuestions(this.answer, this.lesson.costs), ...this.lesson.questions];
      this.stage.append(
        press("On the whole screen, one at a time", () => presentation(questions)),
        quiz(questions, this.given, (words) => this.say(words)),
      );
    }

    show_words() {
      this.stage.append(
        make(
          "dl.dpl-words",
          {},
          ...Object.entries(this.lesson.glossary).flatMap(([word, words]) => [
            make("dt", { text: word }),
            make("dd", { text: words }),
          ]),
        ),
      );
    }
  }

  window.duochat.learn = (element, tools) => new Learn(element, tools);
})();
