/* The first screen of a chat: what this is, who answers, and what to try. */
(() => {
  "use strict";
  const { make, actions } = window.duochat;

  // Tried on the demonstration pair: a model of 135 million parameters says something sensible to each.
  const EXAMPLES = [
    ["Write code", "Write a Python function that reverses a string, and explain it in two sentences."],
    ["Explain something", "Explain in two sentences why the sky is blue."],
    ["Give reasons", "Give three reasons to learn a new language."],
    ["Give advice", "Give me three tips for better sleep."],
  ];

  /** fill(text): puts an example into the composer. */
  function welcome(fill) {
    const answering = make("p.dc-answering");
    window.duochat.head_?.introduce(answering);
    return make(
      "div.dc-empty",
      {},
      make("h1", {}, "Two models write one answer"),
      make(
        "p",
        {},
        "A small one guesses the next words, a large one checks them all: the answer is the large one’s own, mostly sooner. ",
        make("button.dc-link.dc-see", { type: "button", onclick: () => actions.togglePicture() }, "See how"),
      ),
      make(
        "div.dc-cards",
        {},
        ...EXAMPLES.map(([title, text]) =>
          make(
            "button.dc-card",
            { type: "button", onclick: () => fill(text) },
            make("b", {}, title),
            make("span", {}, text),
          ),
        ),
      ),
      answering,
    );
  }

  Object.assign(window.duochat, { welcome });
})();
