/* Drawers and the keyboard: shortcuts, their sheet, and `actions`, which the parts of the page fill. */
(() => {
  "use strict";
  const { make, openSheet } = window.duochat;

  const drawer = (id) => document.getElementById(id);
  const isOpen = (id) => drawer(id)?.classList.contains("open");
  const toggle = (id) => drawer(id)?.querySelector(".toggle-button")?.click();

  const SHORTCUTS = [
    ["Enter", "Send"],
    ["Shift + Enter", "New line"],
    ["Esc", "Stop the answer; close what is open"],
    ["Alt + N", "New chat"],
    ["Alt + K", "Search the conversations"],
    ["Alt + R", "Another version of the last answer"],
    ["Alt + E", "Edit your last message"],
    ["Alt + C", "Copy the last answer"],
    ["Alt + S", "Settings"],
    ["Alt + P", "Show or hide the live picture"],
    ["/", "To the text box"],
    ["?", "This sheet"],
  ];

  const help = () => {
    const rows = SHORTCUTS.map(([keys, what]) =>
      make(
        "tr",
        {},
        make("td", {}, ...keys.split(" + ").flatMap((k, i) => [i ? " " : "", make("kbd", {}, k)])),
        make("td", {}, what),
      ),
    );
    openSheet("Keyboard shortcuts", "", make("table", {}, make("tbody", {}, ...rows)));
  };

  const actions = {}; // filled by the parts: newChat, search, retry, edit, copy, stop, focus
  const ALT = { n: "newChat", k: "search", r: "retry", e: "edit", c: "copy", p: "togglePicture" };

  // The first stop of the Tab key leads past the list of conversations.
  document.addEventListener("DOMContentLoaded", () =>
    document.body.prepend(
      make(
        "a.dc-skip",
        { href: "#message", onclick: (e) => (e.preventDefault(), actions.focus?.()) },
        "To the message box",
      ),
    ),
  );

  document.addEventListener("keydown", (e) => {
    const typing = e.target.closest?.("input, textarea, select, [contenteditable]");
    if (e.key === "Escape" && !document.querySelector("dialog[open]")) return void actions.escape?.(e);
    if (e.altKey && !e.ctrlKey && !e.metaKey) {
      const letter = e.code.startsWith("Key") ? e.code.slice(3).toLowerCase() : "";
      const does = letter === "s" ? () => toggle("settings") : actions[ALT[letter]];
      if (does) (e.preventDefault(), does());
      return;
    }
    if (typing || e.ctrlKey || e.metaKey) return;
    if (e.key === "?") (e.preventDefault(), help());
    if (e.key === "/") (e.preventDefault(), actions.focus?.());
  });

  Object.assign(window.duochat, { isOpen, toggle, help, actions });
})();
