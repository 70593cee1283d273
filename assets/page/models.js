/* The head of the page: the pair of models and its state, the picker of pairs, picture and settings buttons. */
(() => {
  "use strict";
  const { make, icon, button, press, toast, actions } = window.duochat;

  const SHARED =
    "There is no graphics card here: both models share the processor, which shows how it works rather than how fast it can be.";

  class Head {
    constructor(server) {
      this.server = server;
      this.chip = make(
        "button.dc-chip",
        { type: "button", title: "Models", onclick: () => this.pick() },
        make("i"),
        make("span", {}, "Models"),
      );
      this.element = make(
        "div.dc-head",
        {},
        make("h1.dc-hidden", {}, "DuoChat"),
        this.chip,
        button("lanes", "Live picture (Alt + P)", () => actions.togglePicture?.()),
        button("sliders", "Settings (Alt + S)", () => window.duochat.toggle("settings")),
      );
      this.place();
      this.watch();
    }

    /** Into the bar of the tabs, as soon as Gradio has drawn it. */
    place() {
      const bar = document.querySelector("#tabs > .tab-wrapper");
      if (bar)
        bar.append(
          button("panel", "Conversations", () => window.duochat.toggle("side-bar"), "icon.dc-reopen"),
          this.element,
        );
      else setTimeout(() => this.place(), 50);
    }

    async watch() {
      let state = {};
      try {
        state = (await this.server.state({})) || {};
        this.show(state);
      } catch {
        /* the chat says that the server is away */
      }
      const soon = state.state === "loading" || state.choosing || this.sheet;
      this.timer = setTimeout(() => this.watch(), soon ? 700 : 15000);
    }

    show(state) {
      if (state.refused || !state.target) return;
      this.state = state;
      const [doing, done, all] = state.choosing || state.loading || [];
      const percent = all ? ` ${Math.floor((100 * done) / all)} %` : "";
      this.chip.dataset.is = state.state;
      this.chip.lastChild.textContent =
        state.state === "loading"
          ? `${capital(doing || "Loading")}${percent}`
          : state.state === "dead"
            ? "Not loaded"
            : state.target;
      this.chip.classList.toggle("warn", Boolean(state.hardware.draft_fault));
      this.chip.title = [
        `Target ${state.target}, draft ${state.draft}`,
        state.error,
        state.hardware.shares_cores && SHARED,
      ]
        .filter(Boolean)
        .join(". ");
      this.introduce(document.querySelector(".dc-answering"));
      window.duochat.picture_?.use(state);
      if (this.sheet) this.progress(state);
    }

    /** Who answers, for what it is; a demonstration model with the way to a better one. */
    introduce(place) {
      if (!place || !this.state) return;
      const { target, draft, demonstration, hardware } = this.state;
      const words = demonstration
        ? [
            make("b", {}, target),
            " answers now, a tiny demonstration model: it writes fluently and often errs. ",
            press("Choose a better one", () => this.pick(), ".dc-link"),
          ]
        : [make("b", {}, target), ` answers now, with ${draft} guessing ahead.`];
      place.replaceChildren(...words, hardware.shares_cores ? make("span", {}, ` ${SHARED}`) : "");
    }

    /** In the sheet: what is fetched or loaded, else what went wrong. */
    progress(state) {
      const [doing, done, all] = state.choosing || (state.state === "loading" && (state.loading || ["Loading"])) || [];
      const off = state.error || (state.hardware.draft_fault && `Speculation is off: ${state.hardware.draft_fault}`);
      const key = JSON.stringify([doing, done, all, off]);
      if (this.told === key) return;
      this.told = key;
      this.line.replaceChildren();
      if (doing) {
        this.line.append(
          make("span", {}, `${capital(doing)}${all ? `: ${amount(done)} of ${amount(all)}` : ""}`),
          make("progress.dc-progress", { max: 1, value: all ? done / all : null, "aria-label": "Progress" }),
        );
      } else if (off)
        this.line.append(make("p.dc-fault", { role: "alert", html: icon("warn") }, make("span", {}, off)));
      if (state.hardware.shares_cores) this.line.append(make("p.dc-facts", {}, SHARED));
    }

    async pick() {
      this.told = "";
      this.line = make("div.dc-loading", { role: "status" });
      this.pairs = make("div.dc-pairs", {}, make("p", {}, "Looking at what there is"));
      const sheet = (this.sheet = make(
        "dialog.dc-sheet.wide",
        { "aria-label": "Models" },
        make(
          "header",
          {},
          make("h2", {}, "Models"),
          button("close", "Close", () => sheet.close()),
        ),
        make(
          "p",
          {},
          "The target decides every token, the draft guesses ahead. A change counts for everybody who uses this DuoChat.",
        ),
        this.line,
        this.pairs,
      ));
      sheet.addEventListener("close", () => (sheet.remove(), (this.sheet = null)));
      sheet.addEventListener("click", (e) => e.target === sheet && sheet.close());
      document.body.append(sheet);
      sheet.showModal();
      this.list(await this.server.models({}).catch(() => null));
      clearTimeout(this.timer);
      this.watch();
    }

    list(answer) {
      if (!this.sheet) return;
      if (!answer || answer.refused)
        return this.pairs.replaceChildren(make("p.dc-fault", {}, answer?.refused || "The server does not answer."));
      const order = [...answer.pairs].sort((a, b) => b.used - a.used || b.fits - a.fits); // what one can load comes first
      this.pairs.replaceChildren(...order.map((p) => this.pair(p)));
    }

    pair(p) {
      const memory = p.target_gib ? `${p.target_gib} GiB for the target, ${p.draft_gib} GiB for the draft` : "";
      const fetch = p.target_cached && p.draft_cached ? "on this machine" : "will be downloaded";
      const choose = make("button.dc-primary", { type: "button", onclick: () => this.use(p, choose) }, "Load");
      const act = p.used ? make("span.dc-used", { html: icon("check") }, "In use") : p.fits ? choose : null;
      return make(
        `section.dc-pair${p.used ? ".used" : ""}${p.fits ? "" : ".unfit"}`,
        { "aria-label": p.name },
        make(
          "div",
          {},
          make("b", {}, p.target),
          make("span", {}, ` with ${p.draft}`),
          make("p", {}, p.description),
          make("p.dc-facts", {}, [memory, fetch].filter(Boolean).join(" · ")),
          p.fits ? null : make("p.dc-facts.warn", {}, `Does not fit: ${p.unfit}`),
        ),
        act,
      );
    }

    async use(p, from) {
      from.disabled = true;
      const answer = await this.server.use({ name: p.name }).catch(() => null);
      if (!answer || answer.refused) toast(answer?.refused || "The server does not answer.");
      else this.list(answer);
      clearTimeout(this.timer);
      this.watch();
    }
  }

  /** The drawer of settings: names of decoders set off from what they do. */
  const dressSettings = () => {
    const spans = document.querySelectorAll("#decoder label > span");
    if (!spans.length) return void setTimeout(dressSettings, 100);
    for (const span of spans) {
      const [name, ...rest] = span.textContent.split(": ");
      if (rest.length) span.replaceChildren(make("b", {}, name), rest.join(": "));
    }
  };

  const capital = (words) => words[0].toUpperCase() + words.slice(1);
  const amount = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(2)} GB` : n >= 1e6 ? `${(n / 1e6).toFixed(0)} MB` : n);

  window.duochat.head = (server) => (window.duochat.head_ = new Head(server));
  dressSettings();
})();
