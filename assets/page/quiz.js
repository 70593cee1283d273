/* Exercises, checked as they are answered. */
(() => {
  "use strict";
  const { make, press } = window.duochat;

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

  /** The same on the whole screen, for a room: one question at a time; the arrow keys turn the page. */
  function presentation(questions) {
    let at = 0;
    const page = make("div.dpl-slide");
    const turn = (by) => {
      at = Math.min(Math.max(at + by, 0), questions.length - 1);
      page.replaceChildren(
        make("small", {}, `${at + 1} of ${questions.length}`),
        make(
          "ol",
          {},
          question(questions[at], at, () => {}),
        ),
      );
    };
    const sheet = make(
      "dialog.dp.dpl-room",
      { "aria-label": "Exercises", onkeydown: (e) => e.target.type !== "number" && arrows(e, turn) },
      page,
      make(
        "footer.dpl-turn",
        {},
        press("‹ before", () => turn(-1)),
        press("Close", () => sheet.close()),
        press("next ›", () => turn(1), ".dp-button.dp-primary"),
      ),
    );
    sheet.addEventListener("close", () => (document.fullscreenElement && document.exitFullscreen(), sheet.remove()));
    document.body.append(sheet);
    turn(0);
    sheet.showModal();
    sheet.requestFullscreen?.().catch(() => {}); // not allowed: the sheet fills the window
  }

  function arrows(event, turn) {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -1, PageDown: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    turn(by);
  }

  Object.assign(window.duochat, { quiz, presentation });
})();
