/* Exercises, checked as they are answered. */
(() => {
  "use strict";
  const { make } = window.duochat;

  /** given: what was answered rightly so far, by number; say(words) tells the score. */
  function quiz(questions, given, say) {
    const tally = () => say(`${[...given.values()].filter(Boolean).length} of ${questions.length} exercises solved.`);
    tally();
    return make(
      "ol.dpl-questions",
      {},
      ...questions.map((q, i) => question(q, i, (right) => (given.set(i, right), tally()))),
    );
  }

  function question(q, index, note) {
    const verdict = make("p.dpl-verdict", { role: "status" });
    const answer = (right) => {
      note(right);
      verdict.textContent = `${right ? "✓ Right." : "✗ Not quite."} ${right || q.kind === "number" ? q.because : "Try again."}`;
      verdict.dataset.right = right;
    };
    const fields =
      q.kind === "choice"
        ? q.options.map((words, i) => option(words, `dpl-q${index}`, () => answer(i === q.right)))
        : [numberField(q, answer)];
    return make("li", {}, make("p", { text: q.ask }), ...fields, verdict);
  }

  const option = (words, name, onchange) =>
    make("label.dpl-option", {}, make("input", { type: "radio", name, onchange }), words);

  function numberField(q, answer) {
    const input = make("input", { type: "number", step: "any", "aria-label": q.ask });
    const check = () => input.value !== "" && answer(Math.abs(Number(input.value) - q.right) <= q.slack + 1e-9);
    return make(
      "form.dpl-number",
      { onsubmit: (e) => (e.preventDefault(), check()) },
      input,
      make("span", { text: q.unit }),
      make("button.dp-button", { type: "submit", text: "Check" }),
    );
  }

  Object.assign(window.duochat, { quiz });
})();
