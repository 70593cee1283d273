/* Figures of the lesson: a place of a round, three ways to spend the same time, and the draft budget. */
(() => {
  "use strict";
  const { make, press, table, fixed, percent, exact, shown, isNumber } = window.duochat;

  /** One place of a round: why its token stands there, and draft against target as paired bars. */
  function placeCard(place) {
    const scale = (x) => (isNumber(x) ? Math.max(0.01, x).toFixed(3) : "0");
    const pair = (bar) => {
      const draft = make("i.dpl-bar.dpl-bar-draft");
      const target = make("i.dpl-bar.dpl-bar-target");
      draft.style.setProperty("--v", scale(bar.draft));
      target.style.setProperty("--v", scale(bar.target));
      const word = make(bar.chosen ? "code.dpl-chosen" : "code", { text: shown(bar.text) });
      const small = (words) => make("small", {}, words);
      return [
        [word, bar.chosen && small(" ◀ the target’s")],
        [draft, small(isNumber(bar.draft) ? percent(bar.draft) : "not drafted")],
        [target, small(isNumber(bar.target) ? percent(bar.target) : "not asked")],
        ...(isNumber(bar.noise) ? [small(`noise ${bar.noise > 0 ? "+" : ""}${fixed(bar.noise, 2)}`)] : []),
      ];
    };
    return make(
      "li.dpl-place",
      {},
      make("p", {}, make(`span.dp-t.dp-${place.kind}`, { text: shown(place.text) }), ` ${place.why}`),
      table(["", "draft", "target"], place.bars.map(pair), ".dpl-bars"),
    );
  }

  /** Three ways to spend the same time: alone, in turns, at once. Block lengths follow the measured costs. */
  function timelines(costs) {
    const forward = 120;
    const each = Math.max(4, Math.min(forward / 2, forward * costs.c));
    const many = Math.max(1, Math.min(8, Math.floor(forward / each)));
    const total = 3 * forward + 3 * 4 * each;
    const strip = (name, note, cpu, gpu) =>
      make(
        "div.dpl-strip",
        {},
        make("b", { text: name }),
        lane("Draft", "cpu", cpu, total),
        lane("Target", "gpu", gpu, total),
        make("small", { text: note }),
      );
    const turn = 4 * each + forward;
    const rows = (n, make) => Array.from({ length: n }, (_, i) => make(i)).flat();
    const count = (length) => Math.floor(total / length);
    return make(
      "div.dpl-strips",
      {},
      strip(
        "The target alone",
        "one token a forward; the draft idles",
        [],
        rows(count(forward), (i) => [[i * forward, forward]]),
      ),
      strip(
        "In turns",
        "several tokens a forward, but always one device waits",
        rows(count(turn), (i) => rows(4, (j) => [[i * turn + j * each, each]])),
        rows(count(turn), (i) => [[i * turn + 4 * each, forward]]),
      ),
      strip(
        "At once",
        "the draft guesses what the next forward verifies",
        rows(count(forward), (i) => rows(many, (j) => [[i * forward + j * each, each]])),
        rows(count(forward), (i) => [[i * forward, forward]]),
      ),
    );
  }

  function lane(name, kind, blocks, total) {
    const track = make(
      "span.dpl-track",
      {},
      ...blocks.map(([start, length]) => {
        const block = make(`i.dpl-block.dp-swatch-${kind}`);
        block.style.left = `${(100 * start) / total}%`;
        block.style.width = `calc(${(100 * length) / total}% - 1px)`;
        return block;
      }),
    );
    return make("span.dpl-lane", {}, make("em", { text: name }), track);
  }

  /** One forward, and the drafted tokens that fit beside it. longest: seconds that fill the width. */
  function budgetFigure({ target, draft, budget }, longest) {
    const fit = Math.floor(budget + 1e-9);
    const blocks = Array.from({ length: Math.min(fit + 1, 200) }, (_, i) => [i * draft, draft]);
    const total = Math.max(longest, draft * (fit + 1)) * 1.02;
    const drawn = lane("Draft", "cpu", blocks.slice(0, fit), total);
    if (blocks[fit]) {
      const late = make("i.dpl-block.dpl-late");
      late.style.left = `${(100 * blocks[fit][0]) / total}%`;
      late.style.width = `${(100 * draft) / total}%`;
      drawn.lastChild.append(late);
    }
    return make(
      "div",
      {},
      drawn,
      lane("Target", "gpu", [[0, target]], total),
      make(
        "p.dpl-formula",
        {},
        "γ* = T_target / T_draft = ",
        make("b", { text: exact(target) }),
        " / ",
        make("b", { text: exact(draft) }),
        " = ",
        make("b.dpl-big", { text: `${fixed(budget)} tokens` }),
      ),
    );
  }

  /** What the recorded answers gained or lost, measured. open(name): shows one of them. */
  function comparison(answers, open) {
    const row = ({ title, name, alpha, c, tau, speedup }) => [
      press(title, () => open(name), ".dpl-link"),
      percent(alpha),
      fixed(c, 2),
      fixed(tau, 2),
      `${fixed(speedup, 2)}×`,
    ];
    const made = table(["recorded answer", "α", "c", "τ", "speed over plain"], answers.map(row), ".dpl-buys");
    answers.forEach(({ speedup }, i) => made.tBodies[0].rows[i].classList.toggle("dpl-slower", speedup < 1));
    return made;
  }

  Object.assign(window.duochat, { timelines, budgetFigure, placeCard, comparison });
})();
