/* The figures of an answer on demand: a row each, with its number, a bar, and what it means. */
(() => {
  "use strict";
  const { make, fixed, percent, seconds, plural, isNumber, speedupNote, rest } = window.duochat;

  const ROWS = [
    [
      "speed",
      "Speed",
      "Tokens a second, from the first token to the last. “First token” is the wait before it: reading the prompt.",
    ],
    [
      "speedup",
      "Against plain decoding",
      "This answer’s speed over that of the large model alone, measured in the same engine on this machine.",
    ],
    [
      "tau",
      "Tokens per step, τ",
      "Tokens written per step (forward) of the large model, its own one included. Plain decoding has exactly 1.",
    ],
    [
      "alpha",
      "Guesses that were right, α",
      "Accepted over tested guesses. A guess below a wrong one is left untested and counts neither way.",
    ],
    [
      "drafted",
      "Guesses per step, γ",
      "Tokens that the draft guesses while the target computes one step. γ* = T_target / T_draft is how many fit beside it.",
    ],
    ["cpu", "The draft at work", "Share of the time in which the small model computes; the rest it idles."],
    ["gpu", "The target at work", "Share of the time in which the large model computes; the rest it idles."],
  ];

  class Figures {
    constructor(picture) {
      this.picture = picture;
      this.rows = {};
      this.node = make(
        "div.dp-figures",
        { role: "group", "aria-label": "Figures of this answer" },
        ...ROWS.map((row) => this.row(...row)),
      );
    }

    row(key, title, meaning) {
      const parts = (this.rows[key] = {
        value: make("b", {}, "–"),
        bar: make(`i.dp-meter.dp-meter-${key}`),
        note: make("small"),
      });
      return make(
        `details.dp-figure.dp-figure-${key}`,
        {},
        make("summary", {}, make("span", {}, title), parts.bar, parts.value),
        make("p", {}, meaning),
        make("p.dp-now", {}, parts.note),
      );
    }

    set(key, value, share, note) {
      const parts = this.rows[key];
      parts.value.textContent = value;
      parts.bar.style.setProperty("--v", isNumber(share) ? Math.min(Math.max(share, 0), 1).toFixed(3) : "0");
      parts.note.textContent = note;
    }

    draw() {
      const { gauges: g, state, budget } = this.picture.answer;
      this.set(
        "speed",
        isNumber(g.rate) ? `${fixed(g.rate)} tokens/s` : "–",
        null,
        `Now ${fixed(g.now)} tokens/s. First token after ${seconds(g.ttft)}.`,
      );
      this.set("speedup", isNumber(g.speedup) ? `${fixed(g.speedup, 2)}×` : "–", null, speedupNote(g, state.decoder));
      this.set("tau", fixed(g.tau, 2), null, `${plural(g.tokens || 0, "token")} in ${plural(g.rounds || 0, "step")}.`);
      const [accepted, rejected, ignored] = [g.accepted || 0, g.rejected || 0, g.ignored || 0];
      this.set(
        "alpha",
        percent(g.alpha),
        g.alpha,
        `${accepted} of ${accepted + rejected} tested guesses accepted; ${ignored} more were left untested.`,
      );
      this.drawBudget(g, state.own_budget, budget);
      for (const lane of ["cpu", "gpu"]) this.drawLane(lane, g, state.finish);
    }

    drawBudget(g, own, computed) {
      const goal = own || computed,
        scale = 1.25 * Math.max(goal || 0, g.drafted_per_round || 0, 1);
      const fits = computed ? `γ* is ${fixed(computed)}` : "γ* is not measured yet";
      this.set(
        "drafted",
        fixed(g.drafted_per_round),
        (g.drafted_per_round || 0) / scale,
        own ? `Set by hand: ${own} a step (${fits}).` : `${fits}.`,
      );
      this.rows.drafted.bar.classList.toggle("dp-goal", Boolean(goal));
      this.rows.drafted.bar.style.setProperty("--goal", (goal / scale).toFixed(3));
    }

    /** While the answer is written: over the last two seconds; then over the whole of it. */
    drawLane(lane, g, finish) {
      const idle = g[`${lane}_idle`],
        load = g[`${lane}_load`];
      const busy = finish ? 1 - idle : g[`${lane}_busy`];
      const device = lane === "cpu" ? "The whole processor" : "The graphics card";
      this.set(
        lane,
        percent(busy),
        busy,
        `${finish ? "Over the whole answer" : "Over the last two seconds"}; idle ${percent(idle)} since the first token.` +
          (lane === "cpu" ? rest(this.picture.answer) : "") +
          (finish ? "" : loaded(device, load, lane === "gpu" && this.picture.machine.shares)),
      );
    }
  }

  /** What all programs together ask of a device; a target on the processor has none of its own. */
  function loaded(device, load, shared) {
    if (shared) return "";
    return isNumber(load)
      ? ` ${device}, all programs together: ${percent(load)} busy.`
      : ` ${device}: its load is not reported by this system.`;
  }

  Object.assign(window.duochat, { Figures });
})();
