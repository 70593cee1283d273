/* The Race tab: a form that asks for two runs, and what becomes of their record. player.js replays it. */
(() => {
  "use strict";
  const { make, save, remember, recall, linked, linkButton, playRace, reduced, decoderName } = window.duochat;

  class Race {
    constructor(element, { server }) {
      this.server = server;
      this.form = make("form.dp.dpr-form", {
        onsubmit: (e) => {
          e.preventDefault();
          this.start();
        },
      });
      this.status = make("p.dpr-status", { role: "status" });
      this.stage = make("div.dpr-stage");
      element.replaceChildren(
        make(
          "div.dp-tab",
          {},
          make(
            "header.dp-intro",
            {},
            make("h2", { text: "Race" }),
            make("p", {
              text: "Two ways of decoding, the same prompt, the same models. They run one after the other, so that neither disturbs the other; then both are replayed on one clock.",
            }),
          ),
          this.form,
          this.stage,
        ),
      );
      this.build();
    }

    async build() {
      const { ready, decoders } = await this.server.prepare({});
      const choose = (label, chosen) =>
        make(
          "label",
          {},
          make("span", { text: label }),
          make(
            "select",
            {},
            ...Object.entries(decoders).map(([name, title]) =>
              make("option", { value: name, text: title, selected: name === chosen }),
            ),
          ),
        );
      const number = (label, value, props) =>
        make("label", {}, make("span", { text: label }), make("input", { type: "number", value, ...props }));
      this.prompt = make("textarea", {
        rows: 3,
        "aria-label": "Prompt of the race",
        placeholder: "What shall both answer?",
      });
      this.fields = {
        left: choose("First", "duotree"),
        right: choose("Second", "autoregressive"),
        temperature: number("Temperature", 0, { min: 0, max: 2, step: 0.1 }),
        seed: number("Seed", 7, { min: 0, step: 1 }),
        max_tokens: number("Tokens", 128, { min: 1, max: 512, step: 1 }),
      };
      this.go = make("button.dp-button.dp-primary", { type: "submit", text: "Start the race" });
      this.halt = make("button.dp-button", {
        type: "button",
        text: "Stop",
        hidden: true,
        onclick: () => this.server.halt({ ticket: this.ticket }),
      });
      this.saves = make(
        "span.dpr-saves",
        { hidden: true },
        make("button.dp-button", { type: "button", text: "Save as HTML", onclick: () => this.saveHtml() }),
        make("button.dp-button", {
          type: "button",
          text: "Save as JSON",
          onclick: () => save("race.json", JSON.stringify(this.record), "application/json"),
        }),
        (this.copying = make("span")),
      );
      const open = make("input.dp-hidden", {
        type: "file",
        accept: ".json,application/json",
        onchange: (e) => this.open(e.target),
      });
      this.form.append(
        make("div.dpr-ready", { role: "group", "aria-label": "Ready prompts" }, ...ready.map((r) => this.chip(r))),
        this.prompt,
        make("div.dpr-fields", {}, ...Object.values(this.fields)),
        make(
          "div.dpr-actions",
          {},
          this.go,
          this.halt,
          this.saves,
          make("label.dp-button.dpr-open", {}, "Open a saved race", open),
        ),
        this.status,
      );
      this.take(ready[0]);
      if (recall("race")) this.show(JSON.parse(recall("race")), false);
      window.addEventListener("hashchange", () => this.invited());
      this.invited();
    }

    /** A link brings the settings of a race, to be run here. */
    invited() {
      const [query] = linked("race") || [];
      if (!query) return;
      const asked = Object.fromEntries(new URLSearchParams(query));
      this.prompt.value = asked.prompt || "";
      for (const name of Object.keys(this.fields)) if (name in asked) this.field(name).value = asked[name];
      this.say("The race of this link: start it to run it on this machine.");
    }

    link() {
      const { prompt, options, runs } = this.record;
      const { temperature, seed, max_tokens } = options;
      const [left, right] = runs.map((run) => run.decoder);
      return linkButton("race", `${new URLSearchParams({ prompt, left, right, temperature, seed, max_tokens })}`);
    }

    chip(ready) {
      const good = ready.expect === "well";
      return make(
        "button.dpr-chip",
        { type: "button", title: ready.why, onclick: () => this.take(ready) },
        make("b", { text: ready.name }),
        make("small", { text: good ? "▲ most guesses hold, as a rule" : "▼ more guesses fail, as a rule" }),
      );
    }

    take(ready) {
      this.prompt.value = ready.prompt;
      this.field("temperature").value = ready.temperature;
      this.field("max_tokens").value = ready.max_tokens;
      this.say(ready.why);
    }

    field(name) {
      return this.fields[name].querySelector("input, select");
    }

    say(words, bad = false) {
      this.status.textContent = words;
      this.status.classList.toggle("dpr-bad", bad);
    }

    async start() {
      const action = Object.fromEntries(Object.keys(this.fields).map((name) => [name, this.field(name).value]));
      const answer = await this.server.start({ ...action, prompt: this.prompt.value });
      if (answer.refused) return this.say(answer.refused, true);
      this.ticket = answer.ticket;
      this.running(true);
      return this.follow();
    }

    running(on) {
      this.go.disabled = on;
      this.halt.hidden = !on;
      this.saves.hidden = on || !this.record;
    }

    async follow() {
      for (;;) {
        const answer = await this.server
          .follow({ ticket: this.ticket })
          .catch(() => ({ refused: "The server does not answer: start DuoChat again." }));
        const fault = answer.refused || answer.error;
        if (fault) {
          this.running(false);
          return this.say(fault, true);
        }
        if (answer.result) return this.show(answer.result);
        this.say(progress(answer.note));
        await new Promise((resolve) => setTimeout(resolve, 250));
      }
    }

    show(record, autoplay = true) {
      this.record = record;
      this.running(false);
      this.copying.replaceChildren(this.link());
      remember("race", JSON.stringify(record));
      this.say("Both runs are recorded. This is the replay.");
      const player = playRace(this.stage, record, autoplay);
      if (autoplay) player.root.scrollIntoView?.({ behavior: reduced() ? "auto" : "smooth", block: "start" });
      return player;
    }

    async saveHtml() {
      const answer = await this.server.saved(this.ticket ? { ticket: this.ticket } : { record: this.record });
      if (answer.refused) return this.say(answer.refused, true);
      return save("race.html", answer.html, "text/html");
    }

    async open(input) {
      const [file] = input.files;
      input.value = "";
      if (!file) return;
      try {
        const record = JSON.parse(await file.text());
        if (record.format !== "duochat-race") throw new Error("another format");
        this.ticket = null;
        this.show(record);
      } catch {
        this.say("That file is not a race that DuoChat saved.", true);
      }
    }
  }

  function progress(note = {}) {
    const which = `Run ${note.run || 1} of 2, ${decoderName(note.decoder)}`;
    if (note.phase === "queued")
      return `${which}: waiting for the engine${note.progress ? `, ${note.progress[0]} before` : ""} …`;
    if (note.phase === "loading") return `${which}: ${note.words || "loading the models"} …`;
    if (note.phase === "warming up") return `${which}: warming up …`;
    return note.tokens ? `${which}: ${note.tokens} tokens …` : `${which}: reading the prompt …`;
  }

  window.duochat.race = (element, tools) => new Race(element, tools);
})();
