/* Light, dark, or as the system is: Gradio marks the dark page with .dark on the body, and so does the choice made here. */
(() => {
  "use strict";
  const { button, say, remember, recall } = window.duochat;
  const NAMES = { "": "as the system", light: "light", dark: "dark" };
  const system = matchMedia("(prefers-color-scheme: dark)");

  const apply = () => {
    const chosen = recall("theme");
    document.body.classList.toggle("dark", chosen ? chosen === "dark" : system.matches);
  };

  /** A button that goes through the themes. */
  const themeButton = () => {
    const name = () => `Theme: ${NAMES[recall("theme")] || NAMES[""]}`;
    const node = button("theme", name(), () => {
      const all = Object.keys(NAMES);
      remember("theme", all[(all.indexOf(recall("theme")) + 1) % all.length]);
      apply();
      node.title = name();
      node.setAttribute("aria-label", name());
      say(name());
    });
    return node;
  };

  document.addEventListener("DOMContentLoaded", () => {
    apply();
    new MutationObserver(apply).observe(document.body, { attributeFilter: ["class"] }); // Gradio sets it again
  });
  system.addEventListener("change", () => setTimeout(apply));

  Object.assign(window.duochat, { themeButton });
})();
