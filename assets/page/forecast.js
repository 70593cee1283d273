/* The forecast: sliders for costs and acceptance, predicted speedups of each schedule, and their curves over γ. */
(() => {
  "use strict";
  const { make, press, table, fixed, percent, isNumber, plural, whatIf } = window.duochat;
  const SCHEDULES = [
    ["plain", "Plain decoding"],
    ["sequential", "In turns"],
    ["chain", "In parallel (the paper)"],
    ["prefetch", "With outcome prefetch"],
  ];

  const SLIDERS = [
    [
      "c",
      "c = T_draft / T_target",
      -2.3,
      0,
      0.01,
      (x) => 10 ** x,
      (c) => Math.log10(c),
      (c) => `${fixed(c, 3)} (γ* ${fixed(1 / c)})`,
    ],
    ["alpha", "α, acceptance", 0, 0.99, 0.01, (x) => x, (x) => x, percent],
    ["gamma", "γ, drafted for a step", 1, 40, 1, (x) => x, (x) => x, (x) => `${x}`],
    ["k", "k, sequences (paper)", 1, 8, 1, (x) => x, (x) => x, (x) => `${x}`],
    ["hits", "h, outcomes prefetched", 0, 1, 0.05, (x) => x, (x) => x, percent],
    ["widen", "w, cost of each verified token", 0, 0.3, 0.005, (x) => x, (x) => x, percent],
  ];

  const EXAMPLE = { alpha: 0.7, k: 1, hits: 0.8 }; // where nothing was drafted

  /** The sliders where this answer lies: its own acceptance, hits, costs and waits. */
  function ofAnswer({ costs }, predicted) {
    const gamma = Math.max(1, Math.round(costs.budget));
    return predicted ? predicted.case : { ...EXAMPLE, c: costs.c, gamma, widen: costs.widen };
  }

  class Forecast {
    constructor(stage, lesson, predicted) {
      Object.assign(this, { lesson, predicted });
      const answer = ofAnswer(lesson, predicted);
      this.values = { ...answer };
      this.outputs = {};
      this.inputs = {};
      const sliders = SLIDERS.map((slider) => this.slider(...slider));
      this.bars = make("div.dpl-rates", { role: "status" });
      this.chart = make("div.dpl-chart");
      this.gap = make("p.dpl-gap");
      const here = press("this answer, its machine", () => this.set(answer));
      const big = press("a fast GPU (c = 1/8)", () =>
        this.set({ c: 0.125, alpha: 0.7, gamma: 8, k: 1, hits: 0.8, widen: 0 }),
      );
      const huge = press("a large target (c = 1/24)", () =>
        this.set({ c: 1 / 24, alpha: 0.8, gamma: 14, k: 1, hits: 0.8, widen: 0 }),
      );
      const bad = press("a bad draft (α = 0.2, c = 0.3)", () =>
        this.set({ c: 0.3, alpha: 0.2, gamma: 3, k: 1, hits: 0.5, widen: 0.05 }),
      );
      stage.append(
        make("div.dpl-row", { role: "group", "aria-label": "Settings to start from" }, here, big, huge, bad),
        make(
          "div.dpl-panel",
          {},
          make("div.dpl-sliders", {}, ...sliders),
          make("div", {}, this.bars, this.gap, this.chart),
        ),
        this.formulas(lesson.formulas),
      );
      this.draw();
    }

    slider(name, label, min, max, step, from, to, say) {
      const input = make("input", {
        type: "range",
        min,
        max,
        step,
        oninput: () => {
          this.values[name] = from(Number(input.value));
          delete this.values.rest; // measured where the sliders stood
          delete this.values.waited;
          this.label(name);
          this.draw();
        },
      });
      input.value = to(this.values[name]);
      this.outputs[name] = make("output");
      this.inputs[name] = { input, to, say };
      this.label(name);
      return make("label", {}, make("span", {}, label, " ", this.outputs[name]), input);
    }

    label(name) {
      this.outputs[name].textContent = this.inputs[name].say(this.values[name]);
    }

    set(values) {
      this.values = { ...values };
      for (const [name, { input, to }] of Object.entries(this.inputs)) {
        input.value = to(this.values[name]);
        this.label(name);
      }
      this.draw();
    }

    draw() {
      const { measured, costs } = this.lesson;
      const answer = whatIf(this.values, this.predicted?.schedule);
      const top = Math.max(2, ...Object.values(answer.now), measured.speedup || 0) * 1.05;
      const bar = ([name, title]) => {
        const rate = answer.now[name];
        const fill = make(`i.dpl-rate.dpl-rate-${name}`);
        fill.style.setProperty("--v", (rate / top).toFixed(4));
        const best = answer.best[name];
        const note = best ? `best ${fixed(best[1], 2)}× at γ = ${best[0]}` : `${fixed(1 / costs.target)} tok/s here`;
        return make(
          rate < 1 ? "div.dpl-slower" : "div",
          {},
          make("span", { text: title }),
          fill,
          make("b", { text: `${fixed(rate, 2)}×${rate < 1 ? " slower" : ""}` }),
          make("small", { text: note }),
        );
      };
      this.bars.replaceChildren(...SCHEDULES.map(bar));
      this.chart.replaceChildren(chart(answer, measured));
      this.gap.textContent = this.told(answer);
    }

    /** Predicted against measured, as long as the sliders stand where this answer lies. */
    told(answer) {
      const { measured } = this.lesson;
      const { predicted } = this;
      const own = Object.entries(ofAnswer(this.lesson, predicted)).every(([name, value]) => this.values[name] === value);
      if (!own) return "";
      if (!predicted) return "Nothing was drafted in this answer: α, γ and h are examples.";
      const rates = `Predicted for this answer, from its own acceptance, hits and waits: ${fixed(answer.now[predicted.schedule], 2)}×, measured: ${fixed(measured.speedup, 2)}×.`;
      return [rates, predicted.gap].join(" ").trim();
    }

    formulas(formulas) {
      return make(
        "details.dp-table",
        { open: true },
        make("summary", { text: "The formulas" }),
        make(
          "dl.dpl-formulas",
          {},
          ...Object.values(formulas).flatMap(([name, formula, words]) => [
            make("dt", { text: name }),
            make("dd", {}, make("code", { text: formula }), make("small", { text: words })),
          ]),
        ),
        make("p.dpl-dim", {
          text: "Speedup over plain decoding, tokens per target step. Each verified token makes a forward w longer: 1 becomes 1 + w·γ. Assumed: every drafted token is accepted with the same probability α; each further sequence catches half of what the ones before it missed. Real text is neither, so measured speedups differ.",
        }),
      );
    }
  }

  /** Speedup over γ, one curve a schedule; γ* as a line, the measured answer as a mark. */
  function chart({ gammas, curves, budget, case: now }, measured) {
    const [width, height, left, bottom] = [560, 250, 40, 34];
    const last = gammas[gammas.length - 1];
    const top = Math.max(1.5, measured.speedup || 0, ...Object.values(curves).flat()) * 1.08;
    const x = (g) => left + ((g - 1) / (last - 1)) * (width - left - 14);
    const y = (s) => height - bottom - (s / top) * (height - bottom - 12);
    const svg = make("svg:svg.dpl-svg", {
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `Predicted speedup over the draft budget; γ* is ${fixed(budget)}${isNumber(measured.speedup) ? `, measured speedup ${fixed(measured.speedup, 2)}` : ""}`,
    });
    const text = (px, py, words, props = {}) => svg.append(make("svg:text", { x: px, y: py, text: words, ...props }));
    const line = (x1, y1, x2, y2, kind) => svg.append(make(`svg:line.${kind}`, { x1, y1, x2, y2 }));
    for (let s = 0; s <= top; s += top > 4 ? 1 : 0.5) {
      line(left, y(s), width - 14, y(s), "dpl-grid");
      text(left - 6, y(s) + 4, `${s}×`, { "text-anchor": "end" });
    }
    for (const g of [1, 5, 10, 15, 20, 25, 30, 35, 40]) text(x(g), height - 16, `${g}`, { "text-anchor": "middle" });
    text((left + width) / 2, height - 2, "γ, tokens drafted for a step", { "text-anchor": "middle" });
    line(left, y(1), width - 14, y(1), "dpl-one");
    if (budget <= last) {
      line(x(Math.max(1, budget)), 12, x(Math.max(1, budget)), height - bottom, "dpl-star");
      text(x(Math.max(1, budget)) + 4, 20, `γ* = ${fixed(budget)}`, { class: "dpl-strong" });
    }
    line(x(now.gamma), 12, x(now.gamma), height - bottom, "dpl-now");
    for (const [name, values] of Object.entries(curves))
      svg.append(
        make(`svg:polyline.dpl-curve.dpl-curve-${name}`, {
          points: values.map((v, i) => `${x(gammas[i])},${y(v)}`).join(" "),
        }),
      );
    if (isNumber(measured.speedup) && isNumber(measured.gamma)) {
      const [px, py] = [x(Math.min(last, Math.max(1, measured.gamma))), y(measured.speedup)];
      svg.append(make("svg:path.dpl-measured", { d: `M${px},${py - 7} l7,7 -7,7 -7,-7 z` }));
      text(px + 10, py + 4, `measured ${fixed(measured.speedup, 2)}×`, { class: "dpl-strong" });
    }
    return svg;
  }

  /** Predicted speedups of both ideas: on the machine of the answer, and where the target is large beside the draft. */
  function whatTheyBuy({ costs, measured }) {
    const alpha = measured.alpha ?? 0.7;
    const cases = [
      [
        `the answer's machine (γ* ${fixed(costs.budget)}, α ${percent(alpha)})`,
        { c: costs.c, alpha, widen: costs.widen },
      ],
      ["a large target, hard text (γ* 24, α 50 %)", { c: 1 / 24, alpha: 0.5 }],
    ];
    const rows = [
      ...[1, 2, 4].map((k) => [`the paper’s schedule, ${plural(k, "sequence")}`, { k }, "chain"]),
      ...[0.5, 0.8, 1].map((hits) => [
        `outcome prefetch, ready in ${percent(hits)} of the cases`,
        { hits },
        "prefetch",
      ]),
    ];
    const cell = (base, change, schedule) => `${fixed(whatIf({ ...base, ...change }).best[schedule][1], 2)}×`;
    const row = ([name, change, schedule]) => [name, ...cases.map(([, base]) => cell(base, change, schedule))];
    return table(["", ...cases.map(([name]) => name)], rows.map(row), ".dpl-buys");
  }

  Object.assign(window.duochat, { Forecast, whatTheyBuy });
})();
