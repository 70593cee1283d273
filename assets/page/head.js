/* The head of the page: the pair of models and its state, picture and settings buttons. */
(() => {
  "use strict";
  const { make, button, press, toast, remember, recall, actions, capital, ModelSheet } = window.duochat;

  const SHARED =
    "There is no graphics card here: both models share the processor, which shows how it works rather than how fast it can be.";

  class Head {
    constructor(server) {
      this.server = server;
      this.chip = make(
        "button.dc-chip",
        { type: "button", title: "Models", onclick: () => this.pick() },
        make("i"),
        (this.name = make("span", {}, "Models")),
        (this.brief = make("span.dc-brief", {}, "Models")),
        make("b", { "aria-hidden": "true" }, "▾"),
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
      clearTimeout(this.timer);
      const soon = ["loading", "dead"].includes(state.state) || state.changing || this.sheet;
      this.timer = setTimeout(() => this.watch(), soon ? 700 : 15000);
    }

    show(state) {
      if (state.refused || !state.target) return;
      this.state = state;
      const [doing, done, all] = state.choosing || state.loading || [];
      const percent = all ? ` ${Math.floor((100 * done) / all)} %` : "";
      this.chip.dataset.is = state.choosing ? "loading" : state.state;
      this.name.textContent =
        state.choosing || state.state === "loading"
          ? `${capital(doing || "loading")}${percent}`
          : state.state === "dead"
            ? "Not loaded"
            : state.target;
      this.brief.textContent = this.name.textContent.split(/[-. ]/)[0];
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
      if (this.sheet) this.sheet.show(state);
      else if (state.failed.reason && this.failed && this.failed !== state.failed.reason)
        toast(state.failed.reason, ["Models", () => this.pick()]);
      this.failed = state.failed.reason || "none";
    }

    /** Who answers, for what it is; a demonstration model with the way to a better one. */
    introduce(place) {
      if (!place || !this.state) return;
      const { target, draft, demonstration } = this.state;
      const words = demonstration
        ? [
            "Tiny demonstration model, often wrong. ",
            press("Choose a better one.", () => this.pick(), ".dc-link"),
          ]
        : [make("b", {}, target), ` answers, ${draft} guesses ahead.`];
      place.replaceChildren(...words);
    }

    pick() {
      this.sheet = new ModelSheet(this.server, () => this.watch());
      this.sheet.element.addEventListener("close", () => (this.sheet = null));
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

  /** The browser remembers whether the seed is pinned. */
  const rememberPin = () => {
    const box = document.querySelector("#pinned input");
    if (!box) return void setTimeout(rememberPin, 100);
    if (recall("pinned") && !box.checked) box.click();
    box.addEventListener("change", () => remember("pinned", box.checked ? "yes" : ""));
  };

  window.duochat.head = (server) => (window.duochat.head_ = new Head(server));
  dressSettings();
  rememberPin();
})();
