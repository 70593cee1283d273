/* The side bar: conversations by day, search, rename, delete with undo, export and import. */
(() => {
  "use strict";
  const { make, icon, openSheet, toast, save, actions, themeButton } = window.duochat;
  const DAY = 86400;
  const ELSEWHERE = 30_000; // ms between two looks at what other browsers have changed
  const PINNED = "Pinned"; // the folder that comes first
  const LARGEST_IMPORT = 100e6; // characters, as the server takes

  class Side {
    constructor(element, { server }) {
      Object.assign(this, { server, open: "" });
      this.search = make("input", {
        type: "search",
        placeholder: "Search",
        "aria-label": "Search the conversations",
        oninput: () => this.later(),
      });
      this.list = make("nav.dc-list", { "aria-label": "Conversations" });
      this.file = make("input", {
        type: "file",
        accept: ".json,.md,application/json,text/markdown",
        hidden: true,
        onchange: () => this.import(),
      });
      element.replaceChildren(
        make(
          "div.dc-side",
          {},
          make(
            "div.dc-brand",
            {},
            make("img", { src: "page/icon.svg", alt: "", width: 26, height: 26 }),
            make("b", {}, "DuoChat"),
          ),
          make(
            "button.dc-new",
            { type: "button", title: "New chat (Alt + N)", onclick: () => actions.newChat(), html: icon("plus") },
            make("span", {}, "New chat"),
          ),
          make("label.dc-search", { html: icon("search") }, this.search),
          this.list,
          make(
            "footer",
            {},
            this.file,
            make(
              "button.dc-text",
              { type: "button", onclick: () => this.file.click(), html: icon("import") },
              make("span", {}, "Import"),
            ),
            make(
              "button.dc-text",
              {
                type: "button",
                title: "Save all conversations as one JSON file",
                onclick: () => this.export(),
                html: icon("export"),
              },
              make("span", {}, "Export"),
            ),
            make(
              "button.dc-text",
              {
                type: "button",
                title: "Keyboard shortcuts (?)",
                onclick: () => window.duochat.help(),
                html: icon("help"),
              },
              make("span", {}, "Keys"),
            ),
            themeButton(),
          ),
        ),
      );
      actions.search = () => this.find();
      document.addEventListener("visibilitychange", () => document.hidden || this.refresh());
      this.others = new BroadcastChannel("duochat"); // the tabs of this browser
      this.others.onmessage = () => this.look();
      setInterval(() => this.look(), ELSEWHERE);
      window.duochat.head(server);
      const narrow = matchMedia("(max-width: 767px)");
      const shut = () => narrow.matches && window.duochat.isOpen("side-bar") && window.duochat.toggle("side-bar");
      narrow.addEventListener("change", shut);
      setTimeout(shut);
      this.refresh();
    }

    later() {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.refresh(), 150);
    }

    find() {
      if (!window.duochat.isOpen("side-bar")) window.duochat.toggle("side-bar");
      this.search.focus();
      this.search.select();
    }

    async refresh(open = this.open || window.duochat.chat_?.conversation) {
      let found;
      try {
        found = await this.server.conversations({ query: this.search.value });
      } catch {
        return;
      }
      this.open = open;
      if (!found || found.refused) return;
      if (found.notice && this.notice !== found.notice) toast((this.notice = found.notice), null, 30);
      this.draw(found.conversations);
      this.mark(this.open);
    }

    /** Has another tab or browser changed the list? Not while a hand is on it. */
    look() {
      if (!document.hidden && !this.list.querySelector("input, details[open]")) this.refresh();
    }

    /** This tab has changed the list. */
    changed(open) {
      this.others.postMessage("changed");
      return this.refresh(open);
    }

    mark(open) {
      this.open = open;
      for (const item of this.list.querySelectorAll("[data-id]"))
        item.querySelector("a").toggleAttribute("aria-current", item.dataset.id === open);
    }

    draw(conversations) {
      const groups = new Map();
      const folders = [...new Set(conversations.map((c) => c.folder))].filter((f) => f && f !== PINNED).sort();
      this.folders = folders;
      for (const name of [PINNED, ...folders]) groups.set(name, []);
      for (const c of conversations) {
        const name = c.folder || age(c.updated);
        if (!groups.has(name)) groups.set(name, []);
        groups.get(name).push(this.item(c));
      }
      if (!groups.get(PINNED).length) groups.delete(PINNED);
      const held = this.list.contains(document.activeElement) && document.activeElement.closest("li")?.dataset.id;
      const none = make("p.dc-none", {}, this.search.value ? "Nothing found" : "No conversations yet");
      this.list.replaceChildren(
        ...(groups.size
          ? [...groups].flatMap(([name, items]) => [make("h3", {}, name), make("ul", {}, ...items)])
          : [none]),
      );
      if (held) this.focus(held);
    }

    focus(id) {
      this.list.querySelector(`[data-id="${CSS.escape(id)}"] a`)?.focus();
    }

    /** The conversation beside one in the list, "" where there is none. */
    beside(id, by) {
      const ids = [...this.list.querySelectorAll("[data-id]")].map((item) => item.dataset.id);
      return ids[ids.indexOf(id) + by] || "";
    }

    item(c) {
      const link = make(
        "a",
        { href: `#${encodeURIComponent(c.id)}`, title: c.title },
        c.running ? make("i.dc-running", { title: "Being answered" }) : null,
        c.title || "Untitled",
      );
      const menu = make(
        "details.dc-menu",
        {},
        make("summary", { tabindex: "-1", "aria-label": `Actions for ${c.title}`, title: "Actions (→)" }, "⋯"),
        make(
          "div",
          {},
          this.choice("edit", "Rename", () => this.rename(item, c)),
          c.folder
            ? this.choice("folder", `Out of “${c.folder}”`, () => this.move(c, ""))
            : this.choice("pin", "Pin", () => this.move(c, PINNED)),
          this.choice("folder", "Into a folder", () => this.into(c)),
          this.choice("export", "Save as Markdown", () => this.export(c, "markdown")),
          this.choice("export", "Save as JSON", () => this.export(c, "json")),
          this.choice("trash", "Delete", () => this.delete(c)),
        ),
      );
      const item = make("li", { "data-id": c.id }, link, menu);
      link.addEventListener("click", (e) => {
        if (e.ctrlKey || e.metaKey || e.shiftKey) return;
        e.preventDefault();
        window.duochat.chat_.open(c.id);
        if (innerWidth < 768) window.duochat.toggle("side-bar");
      });
      link.addEventListener("dblclick", (e) => (e.preventDefault(), this.rename(item, c)));
      link.addEventListener("keydown", (e) => this.key(e, item, c));
      menu.addEventListener("keydown", (e) => {
        if (e.key !== "Escape" && e.key !== "ArrowLeft") return;
        e.stopPropagation();
        menu.open = false;
        link.focus();
      });
      return item;
    }

    /** Up and down go through the list, to the right is the menu: one stop of the Tab key a conversation. */
    key(event, item, c) {
      const does = {
        F2: () => this.rename(item, c),
        Delete: () => this.delete(c),
        ArrowDown: () => this.focus(this.beside(c.id, 1)),
        ArrowUp: () => this.focus(this.beside(c.id, -1)),
        ArrowRight: () => {
          item.querySelector("details").open = true;
          item.querySelector("details button").focus();
        },
      }[event.key];
      if (does) (event.preventDefault(), does());
    }

    choice(sign, words, does) {
      return make(
        "button",
        {
          type: "button",
          onclick: (e) => (e.target.closest("details").removeAttribute("open"), does()),
          html: icon(sign),
        },
        make("span", {}, words),
      );
    }

    async ask(name, action) {
      try {
        const answer = await this.server[name](action);
        if (answer?.refused) throw new Error(answer.refused);
        return answer || {};
      } catch (fault) {
        toast(fault.message || "The server does not answer: see whether DuoChat still runs.");
        return null;
      }
    }

    rename(item, c) {
      const box = make("input", { type: "text", value: c.title, "aria-label": "New name", maxlength: "120" });
      const link = item.querySelector("a");
      let over = false;
      const finish = async (keep) => {
        if (over) return;
        over = true;
        box.replaceWith(link);
        if (!keep || !box.value.trim() || box.value === c.title) return;
        await this.ask("rename", { conversation: c.id, title: box.value.trim() });
        this.changed();
      };
      box.addEventListener("keydown", (e) => {
        e.stopPropagation();
        if (e.key === "Enter") finish(true);
        if (e.key === "Escape") finish(false);
      });
      box.addEventListener("blur", () => finish(true));
      link.replaceWith(box);
      box.focus();
      box.select();
    }

    async move(c, folder) {
      await this.ask("move", { conversation: c.id, folder });
      this.changed();
    }

    /** Ask for a folder's name; those that are there are offered. */
    into(c) {
      const names = make("datalist", { id: "dc-folders" }, ...this.folders.map((value) => make("option", { value })));
      const box = make("input", { type: "text", list: "dc-folders", maxlength: "60", "aria-label": "Folder" });
      openSheet(
        "Into a folder",
        "",
        make(
          "form.dc-line",
          { method: "dialog", onsubmit: () => box.value.trim() && this.move(c, box.value.trim()) },
          box,
          names,
          make("button.dc-primary", { type: "submit" }, "Move"),
        ),
      );
      box.focus();
    }

    async delete(c) {
      const next = this.beside(c.id, 1) || this.beside(c.id, -1);
      if (!(await this.ask("delete", { conversation: c.id }))) return;
      if (this.open === c.id) actions.newChat();
      await this.changed("");
      if (next) this.focus(next);
      else this.search.focus();
      toast(`Deleted “${c.title}”`, [
        "Undo",
        async () => (await this.ask("restore", { conversation: c.id }), this.changed()),
      ]);
    }

    /** One conversation in a form, or all as JSON. */
    async export(c, form = "json") {
      const answer = await this.ask("export", { conversation: c?.id, form });
      if (answer) save(answer.name, answer.text, form === "json" ? "application/json" : "text/markdown");
    }

    async import() {
      const [file] = this.file.files;
      this.file.value = "";
      if (!file) return;
      if (file.size > LARGEST_IMPORT) return toast("That file is larger than 100 MB: choose one that DuoChat saved.");
      const answer = await this.ask("import_", { text: await file.text(), name: file.name });
      if (!answer) return;
      await this.changed();
      window.duochat.chat_.open(answer.conversation);
      toast(`Imported “${file.name}”`);
    }
  }

  /** The group that a time (seconds) belongs to. */
  const age = (at) => {
    const midnight = new Date().setHours(0, 0, 0, 0) / 1000;
    if (at >= midnight) return "Today";
    if (at >= midnight - DAY) return "Yesterday";
    return at >= midnight - 7 * DAY ? "This week" : "Earlier";
  };

  document.addEventListener("click", (e) => {
    for (const menu of document.querySelectorAll("details.dc-menu[open]"))
      if (!menu.contains(e.target)) menu.removeAttribute("open");
  });

  window.duochat.side = (element, tools) => (window.duochat.side_ = new Side(element, tools));
})();
