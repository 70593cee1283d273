/* The keys of the picture: what the looks of tokens mean, and the blocks of the lanes. */
(() => {
  "use strict";
  const { make, press } = window.duochat;

  const LEGEND = [
    ["accepted", "accepted", "guessed by the draft, chosen by the target too"],
    ["correction", "correction", "the target’s token after a rejection"],
    ["bonus", "bonus", "the target’s token after full acceptance"],
    ["plain", "plain", "the target alone"],
    ["ghost", "waiting", "drafted, waiting for the target"],
    ["chip", "discarded", "wrong or never tested: point at the line, or walk to it with the arrow keys"],
  ];

  function legend() {
    return make(
      "p.dp-legend",
      { "aria-label": "Legend" },
      ...LEGEND.map(([kind, name, hint]) => {
        if (kind === "chip") return make("span", { title: hint }, make("span.dp-chip"), ` ${name}`);
        if (kind === "ghost") return make("span.dp-ghost", { title: hint, data: { text: name } });
        return make(`span.dp-t.dp-${kind}`, { title: hint, text: name });
      }),
    );
  }

  /** explain(): opens what the budget is; without it the word is only named. */
  function lanesKey(explain) {
    const item = (kind, text) =>
      make("span", {}, make(`i.dp-swatch.dp-swatch-${kind}`, { "aria-hidden": "true" }), text);
    return make(
      "span.dp-key",
      {},
      item("cpu", "guesses"),
      item("gpu", "a step, + tokens written"),
      item("idle", "idle"),
      item("budget", explain ? press("budget γ", explain, ".dp-term") : "budget γ"),
    );
  }

  Object.assign(window.duochat, { legend, lanesKey });
})();
