/* The paper's rule for opening sequences, tried by hand on what a draft really proposed. */
(() => {
  "use strict";
  const { make, press, table, fixed, shown } = window.duochat;

  /** The first tokens that the draft had at one place, likeliest first, and its best second token after the first of
   * them: where the rule decides most, some open a sequence and some do not. Null where the draft had no choice. */
  function bestCase(answer) {
    const places = new Map();
    for (const draft of answer.drafts.values()) {
      if (draft.origin === "ngram") continue;
      const key = `${draft.parent}/${draft.position}`;
      places.set(key, [...(places.get(key) || []), draft]);
    }
    const cases = [...places.values()].map((firsts) => {
      const sorted = firsts.sort((a, b) => b.prob - a.prob).slice(0, 5);
      const second = [...answer.drafts.values()]
        .filter((d) => d.parent === sorted[0].id)
        .sort((a, b) => b.prob - a.prob)[0];
      return { firsts: sorted, second, theta: sorted[0].prob * (second?.prob || 0) };
    });
    const open = ({ firsts, theta }) => firsts.filter((d) => d.prob > theta).length;
    const good = cases.filter((c) => c.second && c.firsts.length > 2);
    return good.find((c) => open(c) > 1 && open(c) < c.firsts.length) || good[0] || null;
  }

  function thetaTrial(answer) {
    const found = bestCase(answer);
    if (!found) return null;
    const { firsts, second, theta } = found;
    const boxes = firsts.map(() => make("input", { type: "checkbox" }));
    const verdict = make("p.dpl-verdict", { role: "status" });
    const row = (draft, i) => [
      make("label.dpl-option", {}, boxes[i], make("code", {}, shown(draft.text))),
      `p(1,${i + 1}) = ${fixed(draft.prob, 3)}`,
    ];
    const check = () => {
      const right = firsts.every((draft, i) => boxes[i].checked === draft.prob > theta);
      const opened = firsts.filter((draft) => draft.prob > theta).map((draft) => `‘${shown(draft.text)}’`);
      verdict.dataset.right = right;
      verdict.textContent = right
        ? `✓ Right: θ = ${fixed(firsts[0].prob, 3)} · ${fixed(second.prob, 3)} = ${fixed(theta, 3)}, so ${opened.join(", ")} ${opened.length === 1 ? "opens the only sequence" : `open ${opened.length} sequences`}.`
        : "✗ Not quite: multiply p(1,1) by p(2,1), then take every first token that is likelier.";
    };
    return make(
      "div.dpl-theta",
      {},
      make(
        "p",
        {},
        `The draft’s first tokens at one place of this answer. After ‘${shown(firsts[0].text)}’ its best second token is ‘${shown(second.text)}’ with p(2,1) = ${fixed(second.prob, 3)}. Tick the first tokens that open a sequence: those with p(1,i) > θ = p(1,1)·p(2,1).`,
      ),
      table(["first token", "the draft’s probability"], firsts.map(row), ".dpl-buys"),
      make("div.dpl-row", {}, press("Check", check)),
      verdict,
    );
  }

  Object.assign(window.duochat, { thetaTrial });
})();
