/* A race replayed: both runs side by side on one clock. It needs the picture only, also in a saved file. */
(() => {
  "use strict";
  const { Picture, make, table, fixed, plural, legend, lanesKey, percent, seconds, quoted, reduced } = window.duochat;
  const { decoderName } = window.duochat;

  const SPEEDS = [0.1, 0.25, 0.5, 1, 2];
  const SHORTEST = 4; // seconds of a replay that an eye can follow: shorter runs are shown slowed
  const BUSY = 0.3; // share of the processor; less than that is what a browser takes that shows a page
  const TOLD = 8; // tokens of each side from their first difference on
  const PART = 0.05; // of the runs' time; what is less than that does not change who is faster

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
      this.longest = longest;
      this.bar = make(run.decoder === "autoregressive" ? "i.dpr-bar.dpr-plain" : "i.dpr-bar");
      this.flag = make("span.dpr-flag");
      const picture = make("div");
      this.node = make(
        "section.dpr-side",
        { "aria-label": run.title },
        make("header", {}, make("h3", { text: decoderName(run.decoder) }), this.flag, this.parts.clock),
        make("div.dpr-track", {}, this.bar),
        make(
          "dl.dpr-figures",
          {},
          ...[
            ["tokens/s from request", "rate"],
            ["first token", "first"],
            ["tokens", "tokens"],
          ].map(([name, key]) => make("div", {}, make("dt", { text: name }), make("dd", {}, this.parts[key]))),
        ),
        picture,
      );
      this.picture = new Picture(picture, ["ribbon", "lanes"], {});
    }

    /** Show the state at time t, lanes for `span` seconds: a token is there when the round that brought it has ended. */
    show(t, span) {
      const shown = this.picture.answer.n;
      const count = this.roundsBy(t);
      const done = count === this.rounds.length;
      const state = done ? { finish: "stop", decoder: this.run.decoder } : { decoder: this.run.decoder };
      if (count < shown) this.picture.update({ from: 0, n: count, rounds: this.rounds.slice(0, count), state });
      else if (count > shown)
        this.picture.update({ from: shown, n: count, rounds: this.rounds.slice(shown, count), state });
      this.picture.lanes.see(t, span);
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
      this.bar.style.setProperty("--v", (t / this.longest).toFixed(4));
      this.node.classList.toggle("dpr-done", done);
    }
  }

  class Player {
    constructor(element, record, autoplay = true) {
      this.record = record;
      this.longest = Math.max(...record.runs.map((run) => run.total));
      this.sides = record.runs.map((run) => new Side(run, this.longest));
      this.even = !(record.verdict.factor >= 1.02);
      for (const side of this.sides)
        side.ending = side.run.decoder === record.verdict.winner && !this.even ? "⚑ faster" : "⚑ done";
      this.oneClock(record.hardware || {});
      this.speed = SPEEDS.findLast((speed) => speed <= 1 && this.longest / speed >= SHORTEST) || SPEEDS[0];
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

    /** Both lanes show the same seconds: eight rounds of the slower side, at rest all. */
    oneClock({ target_device: target, draft_threads: threads, shares_cores: shares }) {
      this.span = Math.min(
        this.longest,
        Math.max(...this.sides.map(({ run, rounds }) => (8 * run.total) / rounds.length)),
      );
      for (const { picture } of this.sides) {
        const peers = this.sides.map((side) => side.picture.lanes).filter((lanes) => lanes !== picture.lanes);
        picture.lanes.share(peers, this.longest);
        picture.use({ draft: threads ? `CPU, ${plural(threads, "thread")}` : "", target, shares });
      }
    }

    head() {
      const { verdict, runs, options, prompt, busy } = this.record;
      const names = Object.fromEntries(runs.map((run) => [run.decoder, decoderName(run.decoder)]));
      const factor = this.even
        ? "Both took the same time"
        : `${names[verdict.winner]} is ${fixed(verdict.factor, 2)}× as fast`;
      this.verdict = make(
        "div.dpr-verdict",
        { "aria-live": "polite" },
        make("strong", { text: factor }),
        sameness(verdict),
        make("small", {}, firstTokens(runs, this.longest)),
      );
      const others = `The processor was ${percent(busy)} busy with other work: both runs are slower than this machine can be, and not by the same share.`;
      return make(
        "header.dpr-head",
        {},
        make("blockquote", { text: prompt }),
        make("small", {
          text: `temperature ${options.temperature}, seed ${options.seed}, up to ${options.max_tokens} tokens. Run one after the other, each after a warm-up; replayed on one clock.`,
        }),
        busy > BUSY ? make("p.dpr-busy", { role: "note" }, others) : null,
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
          "aria-pressed": `${speed === this.speed}`,
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
        ["tokens/s after the first token, as Chat counts", (r) => fixed(r.frame.gauges.rate)],
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
      const cells = rows.map(([name, value]) => [name, ...runs.map(value)]);
      const heads = ["", ...runs.map((run) => decoderName(run.decoder))];
      return make(
        "details.dp-table",
        { open: true },
        make("summary", { text: "Figures of both runs" }),
        make("div", {}, table(heads, cells)),
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
      this.seek(this.time);
    }

    seek(t) {
      this.time = t;
      const rests = !this.playing && t >= this.longest;
      for (const side of this.sides) side.show(t, rests ? this.longest : this.span);
      this.scrub.value = t;
      const pace = this.speed === 1 ? "in real time" : `at ${this.speed}× real time`;
      this.label.textContent = `${fixed(t, 2)} of ${fixed(this.longest, 2)} s, ${pace}`;
      this.button.textContent = this.playing ? "❚❚ pause" : "▶ play";
      for (const told of [this.verdict, this.table]) told.classList.toggle("dpr-hidden", t < this.longest);
    }
  }

  /** What the speed counts, and what the wait for the first token makes of it where that differs. */
  function firstTokens(runs, longest) {
    const [a, b] = runs.map((run) => run.ttft);
    const counted = "Counted from the request on, reading the prompt included; Chat counts from the first token on.";
    if (Math.abs(a - b) < PART * longest) return counted;
    const rates = runs.map((run) => `${decoderName(run.decoder)} ${fixed(run.frame.gauges.rate)}`);
    return `${counted} The first tokens came after ${seconds(a)} and ${seconds(b)}; tokens a second from there on: ${rates.join(", ")}.`;
  }

  /** "outputs identical", or where they part. */
  function sameness({ identical, difference }) {
    if (identical) return make("span.dpr-same", { text: "outputs identical ✓" });
    return make("span.dpr-differs", {
      text: `outputs differ from token ${difference.token + 1} on: ${quoted(difference.left)} against ${quoted(difference.right)}`,
    });
  }

  /** Who was faster, and the first token in which the outputs differ: its number from 0, and each side's text from
   * there on. */
  function judged(runs) {
    const [left, right] = runs;
    const parts = left.token_ids.findIndex((id, i) => id !== right.token_ids[i]);
    const token = parts < 0 ? left.token_ids.length : parts;
    const identical = parts < 0 && token === right.token_ids.length;
    const texts = runs.map(({ frame }) => frame.rounds.flatMap(({ tokens }) => tokens.map(([text]) => text)));
    const [ours, theirs] = texts.map((text) => text.slice(token, token + TOLD).join(""));
    const [slow, fast] = [left.rate, right.rate].sort((a, b) => a - b);
    return {
      speedup: right.rate ? left.rate / right.rate : null,
      winner: (left.rate >= right.rate ? left : right).decoder,
      factor: slow ? fast / slow : null,
      identical,
      difference: identical ? null : { token, left: ours, right: theirs },
    };
  }

  /** The record gets its verdict here, if it has none. */
  function playRace(element, record, autoplay = true) {
    record.verdict ||= judged(record.runs);
    return new Player(element, record, autoplay);
  }

  Object.assign(window.duochat, { playRace, judged });
})();
