/* Rendered markdown dressed up: headers of code blocks, typeset formulas, tables with room to scroll. */
(() => {
  "use strict";
  const { make, button, copy } = window.duochat;

  let typesetter;
  const katex = () => (typesetter ??= import(document.querySelector("meta[name=katex]")?.content || "./missing.js"));
  const typeset = async (node) => {
    const tex = node.textContent;
    try {
      const { default: tool } = await katex();
      tool.render(tex, node, {
        displayMode: node.classList.contains("display"),
        throwOnError: false,
        trust: false,
        strict: "ignore",
        maxSize: 20,
        maxExpand: 200,
      });
    } catch {
      node.classList.add("raw");
    }
  };

  /** Give code blocks their header, formulas their shape, tables room to scroll. */
  const dress = (block) => {
    for (const pre of block.querySelectorAll("pre")) {
      const taking = button("copy", "Copy the code", () => copy(pre.querySelector("code").textContent, taking));
      pre.before(make("div.dc-code-head", {}, make("span", {}, pre.dataset.language || "text"), taking));
      pre.tabIndex = 0;
    }
    for (const table of block.querySelectorAll("table")) {
      const room = make("div.dc-table", { tabindex: "0", role: "group", "aria-label": "Table" });
      table.replaceWith(room);
      room.append(table);
    }
    block.querySelectorAll(".math").forEach(typeset);
  };

  Object.assign(window.duochat, { dress });
})();
