/* Drawers and the keyboard: shortcuts, their sheet, and `actions`, which the parts of the page fill. */
(() => {
  "use strict";
  const { make, openSheet } = window.duochat;

  const drawer = (id) => document.getElementById(id);
  const isOpen = (id) => drawer(id)?.classList.contains("open");
  const toggle = (id) => drawer(id)?.querySelector(".toggle-button")?.click();

  const stops = (node) =>
    [...node.querySelectorAll("a, button, input, textarea, summary")].filter(
      (stop) => stop.checkVisibility({ visibilityProperty: true }) && (stop.type !== "radio" || stop.checked),
    );

  /** An open drawer of settings has the focus and keeps it; closed, it gives the focus back to where it was. */
  const hold = (id, name) => {
    const node = drawer(id);
    if (!node) return void setTimeout(hold, 100, id, name);
    let open = false,
      before = null;
    node.setAttribute("role", "dialog");
    node.setAttribute("aria-label", name);
    new MutationObserver(() => {
      if (open === isOpen(id)) return;
      open = !open;
      if (!open) return void (node.contains(document.activeElement) && before?.focus());
      before = document.activeElement;
      setTimeout(() => open && stops(node)[1]?.focus({ preventScroll: true }), 50); // fields come into view by a transition
    }).observe(node, { attributeFilter: ["class"] });
    node.addEventListener("keydown", (e) => {
      const all = stops(node);
      const [edge, other] = e.shiftKey ? [all[0], all.at(-1)] : [all.at(-1), all[0]];
      if (e.key === "Tab" && document.activeElement === edge) (e.preventDefault(), other.focus());
    });
  };

  /** The tabs of the page are one row of keys: arrows, Home and End. */
  const tab = (id) => document.getElementById(`${id}-tab-button`);
  const TABS = ["chat", "race", "learn", "hardware"];
  document.addEventListener("keydown", (e) => {
    const here = TABS.findIndex((id) => tab(id) === e.target);
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: -1 }[e.key];
    if (here < 0 || to === undefined || e.altKey || e.ctrlKey || e.metaKey) return;
    e.preventDefault();
    goTo(TABS.at(to % TABS.length));
  });
  const goTo = (id) => (tab(id).click(), tab(id).focus());

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
    ["/", "To the text box of the chat"],
    ["Alt + Shift + C", "Chat"],
    ["Alt + Shift + R", "Race"],
    ["Alt + Shift + L", "Learn"],
    ["Alt + Shift + H", "Hardware"],
    ["← →", "On the row of tabs: the next one"],
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
      const to = e.shiftKey && TABS.find((id) => id[0] === letter);
      const does = to ? () => goTo(to) : letter === "s" ? () => toggle("settings") : actions[ALT[letter]];
      if (does) (e.preventDefault(), does());
      return;
    }
    if (typing || e.ctrlKey || e.metaKey) return;
    if (e.key === "?") (e.preventDefault(), help());
    if (e.key === "/") (e.preventDefault(), actions.focus?.());
  });

  hold("settings", "Settings");
  Object.assign(window.duochat, { isOpen, toggle, help, actions });
})();
