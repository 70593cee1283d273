/* Prompts that a person keeps for later, in this browser. */
(() => {
  "use strict";
  const { make, button, press, openSheet, remember, recall } = window.duochat;
  const KEY = "prompts";
  const kept = () => JSON.parse(recall(KEY) || "[]");
  const keep = (prompts) => remember(KEY, prompts.length ? JSON.stringify(prompts) : "");
  const titleOf = (text) => text.trim().split("\n")[0].slice(0, 60);

  /** The sheet of prompts. typed(): what stands in the text box; fill(text): puts a prompt there. */
  function openPrompts(typed, fill) {
    const list = make("div.dc-pairs");
    const change = (prompts) => (keep(prompts), draw());
    const row = (prompt, i) =>
      make(
        "section.dc-pair",
        { "aria-label": prompt.title },
        make("div", {}, make("b", {}, prompt.title), make("p.dc-excerpt", {}, prompt.text)),
        make(
          "div.dc-acts",
          {},
          press("Use", () => (fill(prompt.text), sheet.close()), ".dc-primary"),
          button("trash", `Forget ${prompt.title}`, () => change(kept().toSpliced(i, 1))),
        ),
      );
    const draw = () => {
      const prompts = kept(),
        text = typed();
      const fresh = text.trim() && !prompts.some((p) => p.text === text);
      list.replaceChildren(
        ...prompts.map(row),
        prompts.length
          ? ""
          : make("p.dc-facts", {}, "None kept yet. Write one into the message box, then keep it here."),
        fresh
          ? press(
              "Keep what is in the message box",
              () => change([...kept(), { title: titleOf(text), text }]),
              ".dc-text",
            )
          : "",
      );
    };
    draw();
    const sheet = openSheet("Prompts", ".wide", list);
  }

  Object.assign(window.duochat, { openPrompts });
})();
