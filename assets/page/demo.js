/* The moving picture of the empty pane: guess, check, keep. It stands still for those who asked for rest. */
(() => {
  "use strict";
  const { make, press, reduced } = window.duochat;

  const BEFORE = "The tide rolls";
  const GUESSES = ["in", "and", "the", "boat"]; // the target keeps three and has its own fourth
  const OWN = "gulls";
  const NEXT = ["call", "out", "over"];
  const SCENES = [
    ["guess", "A small model guesses the next words, one quick step each.", 2600],
    ["check", "A large model checks all guesses in one slow step. Meanwhile the small one guesses on.", 3200],
    [
      "keep",
      "Guesses that the large model would have written itself are kept; the first wrong one gives way to its own word.",
      3600,
    ],
    ["text", "Four words from one slow step, and every one is the large model’s choice.", 3200],
  ];

  class Demo {
    /** learn(): what "How this works" does. */
    constructor(learn) {
      const word = (text, kind, i) => make(`span.dp-word.dp-word-${kind}`, { style: `--i: ${i}` }, text);
      const lane = (name, hint) => make("div.dp-demo-lane", {}, make("b", {}, name), make("small", {}, hint));
      this.words = make("p.dp-demo-words");
      this.stage = make(
        "div.dp-demo-stage",
        { "aria-hidden": "true" },
        lane("Small model", "guesses"),
        lane("Large model", "decides"),
        lane("Text", "what you read"),
        make(
          "div.dp-demo-board",
          {},
          make("span.dp-demo-before", {}, BEFORE),
          ...GUESSES.map((text, i) => word(text, i < 3 ? "kept" : "wrong", i)),
          word(OWN, "own", 3),
          ...NEXT.map((text, i) => word(text, "next", i)),
        ),
      );
      this.node = make(
        "section.dp.dp-demo",
        { "aria-label": "How two models write one text" },
        this.stage,
        this.words,
        press("How this works", learn, ".dp-button"),
      );
      this.show(reduced() ? 3 : 0);
      if (!reduced()) this.timer = setTimeout(() => this.next(), SCENES[0][2]);
    }

    show(scene) {
      this.scene = scene;
      this.stage.dataset.scene = SCENES[scene][0];
      this.words.textContent = reduced() ? SCENES.map(([, words]) => words).join(" ") : SCENES[scene][1];
    }

    /** The next scene, as long as the picture is in the document; it waits while nobody can see it. */
    next() {
      if (!this.node.isConnected) return;
      if (!document.hidden && this.node.getClientRects().length) this.show((this.scene + 1) % SCENES.length);
      this.timer = setTimeout(() => this.next(), SCENES[this.scene][2]);
    }
  }

  Object.assign(window.duochat, { Demo });
})();
