/* A race replayed: both runs side by side on one clock. It needs the picture only, also in a saved file. */
(() => {
  "use strict";
  const { Picture, make, fixed, plural, legend, lanesKey, percent, seconds, quoted, reduced } = window.duochat;

  const SPEEDS = [0.25, 0.5, 1, 2];
  const shortName = (title) => title.split(":")[0];

  /** One side: figures above, ribbon and lanes below, all as they were at a time of the clock. */
  class Side {
    constructor(run, longest) {
      this.run = run;
      this.rounds = run.frame.rounds;
      this.parts = {
        clock: make("b.dpr-clock", { text: "0.00 s" }),
        rate: make("b", { text: "–" }),
        first: make("b", { text: "–" }),
        tokens: make("b", { text: "0" }),
      };
      this.bar = make("i.dpr-bar");
      this.bar.style.setProperty("--end", (run.total / longest).toFixed(4));
      this.flag = make("span.dpr-flag");
      const picture = make("div");
      this.node = make(
        "section.dpr-side",
        { "aria-label": run.title },
        make("header", {}, make("h3", { text: shortName(run.title) }), this.flag, this.parts.clock),
        make("div.dpr-track", {}, this.bar),
        make(
          "dl.dpr-figures",
          {},
          ...[
            ["tokens/s", "rate"],
            ["first token", "first"],
            ["tokens", "tokens"],
          ].map(([name, key]) => make("div", {}, make("dt", { text: name }), make("dd", {}, this.parts[key]))),
        ),
        picture,
      );
      this.picture = new Picture(picture, ["ribbon", "lanes"], {});
    }

    /** Show the state at time t: a token is there when the round that brought it has ended. */
    show(t) {
      const shown = this.picture.answer.n;
      const count = this.roundsBy(t);
      const done = count === this.rounds.length;
      const state = done ? { finish: "stop", decoder: this.run.decoder } : { decoder: this.run.decoder };
      if (count < shown) this.picture.update({ from: 0, n: count, rounds: this.rounds.slice(0, count), state });
      else if (count > shown)
        this.picture.update({ from: shown, n: count, rounds: this.rounds.slice(shown, count), state });
      this.picture.lanes.clock = t;
      this.picture.wake();
      this.figures(Math.min(t, this.run.total), done);
      this.flag.dataset.is = done ? "done" : t < this.run.ttft ? "reads" : "";
      this.flag.textContent = done ? this.ending : t < this.run.ttft ? "reads the prompt" : "";
    }

    roundsBy(t) {
      let count = 0;
      while (count < this.rounds.length && this.rounds[count].at[1] <= t + 2e-5) count++;
      return count;
    }

    figures(t, done) {
      const tokens = this.picture.answer.tokens.length;
      this.parts.clock.textContent = `${fixed(t, 2)} s`;
      this.parts.rate.textContent = done ? fixed(this.run.rate) : tokens && t > 0 ? fixed(tokens / t) : "–";
      this.parts.first.textContent = t >= this.run.ttft ? seconds(this.run.ttft) : "–";
      this.parts.tokens.textContent = `${tokens}`;
      this.bar.style.setProperty("--v", (tokens / this.run.tokens).toFixed(4));
      this.node.classList.toggle("dpr-done", done);
    }
  }

  class Player {
    constructor(element, record, autoplay = true) {
      this.record = record;
      this.longest = Math.max(...record.runs.map((run) => run.total));
      this.sides = record.runs.map((run) => new Side(run, this.longest));
      for (const side of this.sides) side.ending = side.run.decoder === record.verdict.winner ? "⚑ first" : "⚑ done";
      this.oneClock(record.hardware || {});
      this.speed = 1;
      this.time = 0;
      this.root = make(
        "section.dp.dpr",
        { "aria-label": "Replay of a race" },
        this.head(),
        this.controls(),
        make("div.dpr-key", {}, legend(), lanesKey()),
        make("div.dpr-sides", {}, ...this.sides.map((side) => side.node)),
        (this.table = this.figures()),
      );
      element.replaceChildren(this.root);
      if (autoplay && !reduced()) this.play();
      else this.seek(this.longest);
    }

    /** Both lanes show the same seconds: eight rounds of the slower side. */
    oneClock({ target_device: target, draft_threads: threads, shares_cores: shares }) {
      const span = Math.min(
        this.longest,
        Math.max(...this.sides.map(({ run, rounds }) => (8 * run.total) / rounds.length)),
      );
      for (const { picture } of this.sides) {
        const peers = this.sides.map((side) => side.picture.lanes).filter((lanes) => lanes !== picture.lanes);
        picture.lanes.share(peers, span);
        picture.use({ draft: threads ? `CPU, ${plural(threads, "thread")}` : "", target, shares });
      }
    }

    head() {
      const { verdict, runs, options, prompt } = this.record;
      const names = Object.fromEntries(runs.map((run) => [run.decoder, shortName(run.title)]));
      const factor =
        verdict.factor && verdict.factor < 1.02
          ? "Both took the same time"
          : `${names[verdict.winner]} is ${fixed(verdict.factor, 2)}× as fast`;
      this.verdict = make(
        "div.dpr-verdict",
        { "aria-live": "polite" },
        make("strong", { text: factor }),
        sameness(verdict),
      );
      return make(
        "header.dpr-head",
        {},
        make("blockquote", { text: prompt }),
        make("small", {
          text: `temperature ${options.temperature}, seed ${options.seed}, up to ${options.max_tokens} tokens. Run one after the other, each after a warm-up; replayed on one clock.`,
        }),
        this.verdict,
      );
    }

    controls() {
      this.button = make("button.dp-button.dpr-play", { type: "button", onclick: () => this.toggle() });
      this.scrub = make("input", {
        type: "range",
        min: 0,
        max: this.longest,
        step: this.longest / 1000,
        value: 0,
        "aria-label": "Time of the race in seconds",
        oninput: () => {
          this.playing = false;
          this.seek(Number(this.scrub.value));
        },
      });
      this.label = make("output.dpr-time");
      this.speeds = SPEEDS.map((speed) =>
        make("button.dp-button", {
          type: "button",
          text: `${speed}×`,
          "aria-pressed": `${speed === 1}`,
          "aria-label": `${speed} times real time`,
          onclick: () => this.pace(speed),
        }),
      );
      return make(
        "div.dpr-controls",
        {},
        this.button,
        make("button.dp-button", {
          type: "button",
          text: "⟲ replay",
          onclick: () => {
            this.seek(0);
            this.play();
          },
        }),
        this.scrub,
        this.label,
        make("span.dpr-speeds", { role: "group", "aria-label": "Speed of the replay" }, ...this.speeds),
      );
    }

    /** The figures of both runs as a table. */
    figures() {
      const rows = [
        ["tokens/s, request to last token", (r) => fixed(r.rate)],
        ["first token after", (r) => seconds(r.ttft)],
        ["last token after", (r) => seconds(r.total)],
        ["tokens", (r) => r.tokens],
        ["target forwards", (r) => r.stats.rounds],
        ["τ, tokens a forward", (r) => fixed(r.stats.mean_accepted_length, 2)],
        ["α, acceptance", (r) => (r.stats.tested ? percent(r.stats.acceptance_rate) : "–")],
        ["drafted", (r) => r.stats.drafted],
        ["draft idle", (r) => percent(r.stats.cpu_idle)],
        ["target idle", (r) => percent(r.stats.gpu_idle)],
      ];
      const { runs } = this.record;
      return make(
        "details.dp-table",
        { open: true },
        make("summary", { text: "Figures of both runs" }),
        make(
          "div",
          {},
          make(
            "table",
            {},
            make(
              "thead",
              {},
              make(
                "tr",
                {},
                make("td"),
                ...runs.map((run) => make("th", { scope: "col", text: shortName(run.title) })),
              ),
            ),
            make(
              "tbody",
              {},
              ...rows.map(([name, value]) =>
                make(
                  "tr",
                  {},
                  make("th", { scope: "row", text: name }),
                  ...runs.map((run) => make("td", { text: `${value(run)}` })),
                ),
              ),
            ),
          ),
        ),
      );
    }

    toggle() {
      if (this.playing) this.pause();
      else this.play();
    }

    play() {
      if (this.time >= this.longest) this.time = 0;
      this.playing = true;
      this.last = performance.now();
      this.seek(this.time);
      const tick = (now) => {
        if (!this.playing || !this.root.isConnected) return;
        this.time = Math.min(this.longest, this.time + ((now - this.last) / 1000) * this.speed);
        this.last = now;
        if (this.time >= this.longest) this.playing = false;
        this.seek(this.time);
        if (this.playing) requestAnimationFrame(tick);
      };
      requestAnimationFrame(tick);
    }

    pause() {
      this.playing = false;
      this.seek(this.time);
    }

    pace(speed) {
      this.speed = speed;
      SPEEDS.forEach((s, i) => this.speeds[i].setAttribute("aria-pressed", `${s === speed}`));
    }

    seek(t) {
      this.time = t;
      for (const side of this.sides) side.show(t);
      this.scrub.value = t;
      this.label.textContent = `${fixed(t, 2)} of ${fixed(this.longest, 2)} s`;
      this.button.textContent = this.playing ? "❚❚ pause" : "▶ play";
      for (const told of [this.verdict, this.table]) told.classList.toggle("dpr-hidden", t < this.longest);
    }
  }

  /** "outputs identical", or where they part. */
  function sameness({ identical, difference }) {
    if (identical) return make("span.dpr-same", { text: "outputs identical ✓" });
    return make("span.dpr-differs", {
      text: `outputs differ from token ${difference.token + 1} on: ${quoted(difference.left)} against ${quoted(difference.right)}`,
    });
  }

  const playRace = (element, record, autoplay = true) => new Player(element, record, autoplay);

  Object.assign(window.duochat, { playRace });
})();
