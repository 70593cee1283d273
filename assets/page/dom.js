/* The DOM for all of the page's scripts: elements, icons, notes, files. Stands alone, also in a saved race. */
(() => {
  "use strict";
  window.duochat = window.duochat || {};

  /** An element: make("button.icon.wide", {title, onclick, text, html, data}, ...children), an SVG one as "svg:rect".
   * Strings become text nodes; what is null, undefined or false is left out. */
  const make = (kind, props = {}, ...children) => {
    const [tag, ...classes] = kind.split(".");
    const node = tag.startsWith("svg:")
      ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
      : document.createElement(tag);
    if (classes.length) node.setAttribute("class", classes.join(" "));
    for (const [key, value] of Object.entries(props)) {
      if (value === undefined || value === null || value === false) continue;
      if (key === "html") node.innerHTML = value;
      else if (key === "text") node.textContent = value;
      else if (key === "data") Object.assign(node.dataset, value);
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.filter((c) => c !== null && c !== undefined && c !== false));
    return node;
  };

  const ICONS = {
    send: "M12 19V5M6 11l6-6 6 6",
    stop: "M7 7h10v10H7z",
    copy: "M9 9h10v10H9zM5 15V5h10",
    check: "M5 13l4 4L19 7",
    edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
    retry: "M19 12a7 7 0 1 1-2.1-5M19 4v4h-4",
    forward: "M5 6l6 6-6 6M13 6l6 6-6 6",
    undo: "M9 7L4 12l5 5M4 12h10a5 5 0 0 1 0 10h-2",
    left: "M14 7l-5 5 5 5",
    right: "M10 7l5 5-5 5",
    down: "M12 5v14M6 13l6 6 6-6",
    plus: "M12 5v14M5 12h14",
    trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12M10 11v5M14 11v5",
    export: "M12 15V4M8 8l4-4 4 4M5 14v5h14v-5",
    import: "M12 4v11M8 11l4 4 4-4M5 14v5h14v-5",
    search: "M11 5a6 6 0 1 1 0 12 6 6 0 0 1 0-12zM16 16l4 4",
    sliders: "M4 8h8M18 8h2M15 5.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5zM4 16h2M12 16h8M9 13.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5z",
    help: "M9.5 9.5a2.5 2.5 0 1 1 3.5 2.3c-.7.4-1 .8-1 1.7M12 16.5v.5M12 3.5a8.5 8.5 0 1 1 0 17 8.5 8.5 0 0 1 0-17z",
    lanes: "M3 5h8v5H3zM14 5h7v5h-7zM3 14h12v5H3zM18 14h3v5h-3z",
    panel: "M4 6h16v12H4zM9 6v12",
    close: "M6 6l12 12M18 6L6 18",
    theme: "M12 3.5a8.5 8.5 0 1 0 0 17zM12 3.5a8.5 8.5 0 0 1 0 17",
    book: "M5 5h6a2 2 0 0 1 1 1 2 2 0 0 1 1-1h6v13h-6a2 2 0 0 0-1 1 2 2 0 0 0-1-1H5zM12 6v13",
    clip: "M8 12l6-6a3.2 3.2 0 0 1 4.6 4.6l-8 8A5 5 0 0 1 3.5 11.5l7-7",
    pin: "M9 4h6l-1 6 3 3v2H7v-2l3-3zM12 15v5",
    folder: "M4 6h6l2 2h8v10H4z",
    warn: "M12 4l9 16H3zM12 10v4M12 17v.5",
  };
  const icon = (name) =>
    `<svg viewBox="0 0 24 24" width="1.15em" height="1.15em" fill="none" stroke="currentColor" stroke-width="1.7" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true"><path d="${ICONS[name]}"/></svg>`;

  /** A button that shows an icon and says its name. */
  const button = (name, label, onclick, kind = "icon") =>
    make(`button.dc-${kind}`, { type: "button", title: label, "aria-label": label, html: icon(name), onclick });

  /** A button with words; kind: its classes. */
  const press = (words, onclick, kind = ".dp-button", props = {}) =>
    make(`button${kind}`, { type: "button", onclick, ...props }, words);

  /** A sheet over the page; Escape, its button or a click beside it close it. kind: further classes. */
  const openSheet = (title, kind, ...content) => {
    const close = button("close", "Close", () => sheet.close());
    const head = make("header", {}, make("h2", {}, title), close);
    const sheet = make(`dialog.dc-sheet${kind}`, { "aria-label": title }, head, ...content);
    sheet.addEventListener("close", () => sheet.remove());
    sheet.addEventListener("click", (e) => e.target === sheet && sheet.close());
    document.body.append(sheet);
    sheet.showModal();
    return sheet;
  };

  /** Ask before something that cannot be undone; words: of the button that does it. */
  const askFirst = (title, note, words, does) => {
    const yes = press(words, () => (sheet.close(), does()), ".dc-primary");
    const sheet = openSheet(title, "", make("p", {}, note), yes);
    yes.focus();
  };

  /** A message at the foot of the window that goes away by itself; action: [label, function]. */
  const toast = (words, action, seconds = action ? 8 : 4) => {
    const note = make("div.dc-toast", { role: "status" }, make("span", {}, words));
    const leave = () => note.remove();
    if (action) note.append(make("button", { type: "button", onclick: () => (action[1](), leave()) }, action[0]));
    let stack = document.querySelector(".dc-toasts");
    if (!stack) document.body.append((stack = make("div.dc-toasts")));
    stack.append(note);
    setTimeout(leave, seconds * 1000);
  };

  /** Tell a screen reader something, politely. */
  const say = (words) => {
    let voice = document.getElementById("dc-voice");
    if (!voice) document.body.append((voice = make("div.dc-hidden", { id: "dc-voice", "aria-live": "polite" })));
    voice.textContent = words;
  };

  const copy = async (text, from) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const box = make("textarea.dc-hidden", {}, text);
      document.body.append(box);
      box.select();
      document.execCommand("copy");
      box.remove();
    }
    const before = from.innerHTML;
    from.innerHTML = icon("check");
    setTimeout(() => (from.innerHTML = before), 1200);
    say("Copied");
  };

  const save = (name, text, type) => {
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  const reduced = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

  Object.assign(window.duochat, { make, icon, button, press, openSheet, askFirst, toast, say, copy, save, reduced });
})();
