/* The Hardware tab: the two costs and the budget that follows, their curves, the load now; the rest folded. */
(() => {
  "use strict";
  const { make, press, table, fixed, percent, exact, plural, isNumber } = window.duochat;
  const PERIOD = 1000; // ms between two looks while the tab is shown
  const CURVES = [
    ["target", "Target: one forward", "tokens verified in it", "token"],
    ["draft", "Draft: one batch", "sequences in it", "sequence"],
    ["sweep", "Draft: first look", "threads", "thread"],
  ];
  const FIRST_LOOK =
    "The first look is a short measurement of its own, of batches of four, made only to choose the number of threads. Then the draft is measured with these: its batch of one sequence is the figure above.";

  const WEIGHTS = "The target’s weights alone"; // a pair's need in “Models” has the cache and working space on top
  const FACTS = {
    target_device: "The target runs on",
    target_dtype: "Its numbers are",
    target_weight_bytes: WEIGHTS,
    draft_backend: "The draft is computed by",
    draft_threads: "Threads of the draft",
    cores: "Processor cores",
    draft_fault: "The draft does not work",
  };

  /** What is known of the devices, in words; what people cannot read is left to `chat --json`. */
  function facts(hardware) {
    const known = Object.entries(FACTS).filter(([key]) => ![undefined, null, "", "none"].includes(hardware[key]));
    const told = Object.fromEntries(known.map(([key, name]) => [name, `${hardware[key]}`]));
    if (told[WEIGHTS]) told[WEIGHTS] = `${fixed(told[WEIGHTS] / 2 ** 30, 2)} GiB; cache and working space come on top`;
    for (const name in told) if (told[name] === "native") told[name] = "DuoChat’s own code in C";
    return told;
  }

  /** The measured curves as [size, seconds], sizes ascending; [] where nothing was measured. */
  const curves = (costs) =>
    Object.fromEntries(
      CURVES.map(([name]) => [name, Object.entries(costs[name] || {}).map(([n, s]) => [Number(n), s])]),
    );

  class Hardware {
    constructor(element, { server }) {
      Object.assign(this, { element, server });
      this.cards = make("div", { id: "hardware-summary" });
      this.plots = make("div.dp-plots", { id: "hardware-plots" });
      this.load = make("p.dp-load", { "aria-live": "off" });
      this.more = make("div", { id: "hardware-table" });
      this.chat = make("p.dp-load", { id: "hardware-chat" });
      this.button = press("Measure again", () => this.measure(), ".dp-button", { id: "measure" });
      element.replaceChildren(
        make(
          "div.dp-tab",
          {},
          make(
            "header.dp-intro",
            {},
            make("div.dp.dp-plain.dp-titled", {}, make("h2", {}, "Hardware"), this.button),
            make(
              "p",
              {},
              "What a target forward and a drafted token cost on this machine. The draft budget follows from these two numbers.",
            ),
          ),
          make("div.dp.dp-plain", {}, this.cards, this.chat, this.load, this.plots, this.more),
        ),
      );
      new IntersectionObserver(() => this.look()).observe(element);
      setInterval(() => this.look(), PERIOD);
    }

    /** Ask how things stand, while somebody looks. */
    async look() {
      if (this.asking || document.hidden || !this.element.getClientRects().length) return;
      this.asking = true;
      const known = await this.server.look({}).catch(() => null);
      this.asking = false;
      if (known && !known.refused) this.show(known);
    }

    async measure() {
      this.button.disabled = true;
      const known = await this.server.measure({}).catch(() => ({ refused: "The server does not answer." }));
      this.show(known.refused ? { ...this.known, fault: known.refused } : known);
    }

    show(told) {
      const { load, measuring, hardware, fault } = (this.known = told);
      const { shares_cores: shared } = hardware;
      const costs = hardware.costs || {};
      const known = { curves: curves(costs), threads: costs.threads, facts: facts(hardware), fault };
      this.button.disabled = measuring;
      this.button.textContent = measuring ? "Measuring …" : "Measure again";
      const card = isNumber(load.gpu) ? `${percent(load.gpu)} busy` : "its load is not reported here";
      this.load.textContent = [
        isNumber(load.cpu) && `Processor now ${percent(load.cpu)} busy, all programs together`,
        !shared && `Graphics card ${card}`,
      ]
        .filter(Boolean)
        .join(". ");
      this.chat.textContent = known.curves.draft.length ? beside(window.duochat.picture_?.picture.answer.budget) : "";
      const key = JSON.stringify(known);
      if (this.key === key) return;
      this.key = key;
      this.cards.replaceChildren(summary(known));
      const drawn = CURVES.slice(0, 2).filter(([name]) => known.curves[name].length);
      this.plots.replaceChildren(...drawn.map(([name, title, axis]) => plot(known.curves[name], name, title, axis)));
      this.more.replaceChildren(details(known));
    }
  }

  /** Why the budget is another one in the chat. budget: the latest of the answer that the chat shows, if there is one. */
  const beside = (budget) =>
    `Measured before the first question. While an answer is written the lanes slow each other down, and its budget follows their own times${budget ? `: in the answer in Chat γ* was ${fixed(budget)} at last` : ""}.`;

  /** The two costs, one alone of each, and the budget. */
  function summary({ curves, threads, fault }) {
    const [target, draft] = [curves.target, curves.draft].map(([first]) => first && Number(first[1].toPrecision(4)));
    if (fault) return make("p", { role: "alert" }, fault);
    if (!target || !draft) return make("p", {}, "Nothing is measured yet: press “Measure again”.");
    const cards = [
      ["One step of the target", exact(target), "T_target: one forward of the large model"],
      ["One guess of the draft", exact(draft), `T_draft, on ${plural(threads || 1, "thread")}`],
      [
        "So beside one step fit",
        `${fixed(target / draft)} tokens`,
        `the draft budget γ* = T_target / T_draft; c\u00a0=\u00a0${fixed(draft / target, 3)}`,
      ],
    ];
    return make(
      "dl.dp.dp-costs.dp-plain",
      {},
      ...cards.map(([name, value, note]) =>
        make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, note))),
      ),
    );
  }

  /** Milliseconds over size, sizes on a logarithmic axis, one alone marked. */
  function plot(series, kind, title, axis) {
    const [width, height, left, right, top, bottom] = [440, 250, 44, 24, 34, 42];
    const sizes = series.map(([size]) => size);
    const most = 1000 * Math.max(...series.map(([, seconds]) => seconds));
    const step = nice(most / 4);
    const last = Math.log(sizes.at(-1)) || 1;
    const x = (size) => left + (Math.log(size) / last) * (width - left - right);
    const y = (value) => height - bottom - (value / (step * Math.ceil(most / step))) * (height - top - bottom);
    const text = (px, py, words, more = {}) => make("svg:text", { x: px, y: py, ...more }, words);
    const line = (x1, y1, x2, y2) => make("svg:line.dpl-grid", { x1, y1, x2, y2 });
    const levels = Array.from({ length: Math.ceil(most / step) + 1 }, (_, i) => i * step);
    const points = series.map(([size, seconds]) => [x(size), y(1000 * seconds)]);
    const digits = step < 0.1 ? 2 : step < 1 ? 1 : 0;
    return make(
      "figure",
      {},
      make(
        `svg:svg.dpl-svg.dp-curve-${kind}`,
        { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}, milliseconds by ${axis}` },
        text(0, 16, `${title}, ms`, { class: "dpl-strong" }),
        ...levels.flatMap((v) => [
          line(left, y(v), width - right, y(v)),
          text(left - 8, y(v) + 4, fixed(v, digits), { "text-anchor": "end" }),
        ]),
        ...sizes.map((size) => text(x(size), height - bottom + 18, `${size}`, { "text-anchor": "middle" })),
        text((left + width - right) / 2, height - 6, axis, { "text-anchor": "middle" }),
        make("svg:polyline", { points: points.map((p) => p.join()).join(" ") }),
        ...points.map(([cx, cy], i) => make("svg:circle", { cx, cy, r: i ? 3.5 : 6 })),
      ),
    );
  }

  /** 1, 2 or 5 times a power of ten, not below the value. */
  function nice(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= value);
  }

  /** The devices in words, and the curves as a table. */
  function details({ facts, curves }) {
    const rows = CURVES.flatMap(([name, title, , unit]) =>
      curves[name].map(([n, s]) => [title, plural(n, unit), fixed(1000 * s, 3), fixed(s / curves[name][0][1], 2)]),
    );
    const list = Object.entries(facts).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
    return make(
      "details.dp-more",
      {},
      make("summary", {}, "More of this machine"),
      make("dl.dp.dp-machine.dp-plain", {}, ...list),
      rows.length
        ? make(
            "div.dp.dp-plain",
            { tabindex: "0", role: "group", "aria-label": "Table" },
            table(["what", "size", "ms", "times the first"], rows),
            curves.sweep.length ? make("p.dp-load", {}, FIRST_LOOK) : null,
          )
        : null,
    );
  }

  window.duochat.hardware = (element, tools) => new Hardware(element, tools);
})();
