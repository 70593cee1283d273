/* The sheet of models: the pair in use, what lies on this disk, ready pairs by memory, and any other by name. */
(() => {
  "use strict";
  const { make, icon, press, openSheet, toast, remember, recall, fixed } = window.duochat;
  const CLASSES = [2, 8, 24, 80, Infinity]; // GiB of memory that ready pairs are grouped by
  const SILENT = { refused: "The server does not answer." };

  class Sheet {
    /** changed(): called when something was asked of the server. */
    constructor(server, changed) {
      Object.assign(this, { server, changed });
      this.line = make("div.dc-loading", { role: "status" });
      this.used = make("div.dc-pairs");
      this.disk = make("div.dc-pairs", {}, make("p.dc-facts", {}, "Looking at what lies on this disk"));
      this.ready = make("div.dc-pairs", {}, make("p.dc-facts", {}, "Looking at what there is"));
      this.own = make("div.dc-own");
      this.foresight = make("div.dc-foresight");
      this.element = openSheet(
        "Models",
        ".wide",
        make(
          "p",
          {},
          "The target decides every token, the draft guesses ahead. A change counts for everybody who uses this DuoChat.",
        ),
        this.line,
        this.used,
        make("h3", {}, "On this disk"),
        this.disk,
        make("h3", {}, "Ready pairs"),
        this.foresight,
        this.ready,
        this.own,
      );
      this.load();
    }

    /** What there is: the ready pairs at once, the disk when it has been read. */
    async load() {
      const answer = await this.server.models({}).catch(() => SILENT);
      if (answer.refused) return this.ready.replaceChildren(make("p.dc-fault", {}, answer.refused));
      this.here = answer.here;
      const inUse = (p) => [p.target, p.draft, p.backend].join() === answer.used.join();
      const fit = answer.pairs.filter((p) => p.fits && p.backend !== "torch" && !inUse(p)).sort((a, b) => a.target_gib - b.target_gib);
      this.best = fit.at(answer.hardware.shares_cores ? 0 : -1); // without a graphics card each token reads it all slowly
      this.used.replaceChildren(
        ...answer.pairs.filter(inUse).map((p) => this.pair(p, make("span.dc-used", { html: icon("check") }, "In use"))),
      );
      this.ready.replaceChildren(...this.classes(answer.pairs.filter((p) => !inUse(p))));
      this.own.replaceChildren(...this.other(answer));
      return this.look();
    }

    async look() {
      const answer = await this.server.local({ folder: recall("models") }).catch(() => SILENT);
      if (answer.refused) return this.disk.replaceChildren(make("p.dc-fault", {}, answer.refused));
      const models = answer.models.filter((m) => m.lane).sort((a, b) => b.fits - a.fits);
      const none = make("p.dc-facts", {}, `None found in ${answer.folder}, LM Studio, Ollama, the Hugging Face cache.`);
      this.disk.replaceChildren(
        ...(models.length ? models.map((m) => this.model(m)) : [none]),
        this.here ? this.folder(answer.folder) : "",
      );
    }

    /** Ready pairs under the memory that they need; what is too large for this machine is folded. */
    classes(pairs) {
      const most = (p) => CLASSES.find((gib) => p.target_gib + p.draft_gib <= gib);
      const unfit = pairs.filter((p) => !p.fits).map((p) => this.pair(p, null));
      const fold = make(
        "details.dc-more",
        {},
        make("summary", {}, `Too large for this machine: ${unfit.length}`),
        ...unfit,
      );
      const fit = CLASSES.flatMap((gib) => {
        const among = pairs.filter((p) => p.fits && most(p) === gib);
        const words = gib === Infinity ? "More" : `Up to ${gib} GiB of memory`;
        return among.length ? [make("h4", {}, words), ...among.map((p) => this.pair(p, this.loading(p)))] : [];
      });
      return unfit.length ? [...fit, fold] : fit;
    }

    loading(p) {
      return press("Load", () => this.use(p), p === this.best ? ".dc-primary" : OUTLINED);
    }

    pair(p, act) {
      const [here, size] = [p.target_cached && p.draft_cached, (p.target_gib + p.draft_gib).toFixed(1)];
      const memory = p.target_gib ? `Memory: ${p.target_gib} GiB for the target, ${p.draft_gib} GiB for the draft` : "";
      const short = [
        `drafted by ${plainName(p.draft_name)}`,
        here ? "on this machine" : `${size} GiB download`,
        p === this.best && "recommended here",
      ];
      return this.row(p, act, titled(p), [
        make("p", {}, short.filter(Boolean).join(" · ")),
        forecast(p.forecast),
        make(
          "details.dc-files",
          {},
          make("summary", {}, "Details"),
          make("p", {}, p.description),
          facts(memory),
          facts(make("code", {}, p.name), " with ", make("code", {}, p.draft_name)),
        ),
      ]);
    }

    /** A model on this disk; its drafts, the best first, are there to choose from. */
    model(m) {
      const about = [m.source, `${fixed(m.size)} GiB`, m.quantization, m.architecture, LANES[m.lane]].filter(Boolean);
      const choice = make(
        "select",
        { "aria-label": `Draft for ${m.name}` },
        ...m.drafts.map((d) => make("option", { value: d.reference }, `with ${d.name}`)),
      );
      const drafted = m.drafts.length > 0;
      const load = () => this.use({ target: m.reference, draft: drafted ? choice.value : m.alone });
      return this.row(
        m,
        m.fits ? press(drafted ? "Load" : "Load alone", load, OUTLINED) : null,
        m.name,
        [
          facts(about.join(" · ")),
          drafted
            ? choice
            : make(
                "p.dc-facts",
                {},
                NO_DRAFT,
                make("code", {}, `${DISTILL} ${quoted(m.reference)} --out my-draft.gguf`),
              ),
          forecast(m.forecast),
        ],
      );
    }

    row(p, act, name, lines) {
      return make(
        `section.dc-pair${p.fits ? "" : ".unfit"}`,
        { "aria-label": p.source ? `${name}, ${p.source}` : name },
        make(
          "div",
          {},
          make("b", {}, name),
          ...lines,
          p.fits ? null : make("p.dc-facts.warn", {}, `Does not fit: ${p.unfit}`),
        ),
        act,
      );
    }

    folder(now) {
      const box = make("input", { type: "text", value: now, "aria-label": "Models folder", spellcheck: "false" });
      const look = (e) => {
        e.preventDefault();
        remember("models", box.value.trim());
        this.disk.replaceChildren(make("p.dc-facts", {}, "Looking"));
        this.look();
      };
      return make(
        "form.dc-line",
        { onsubmit: look },
        make("label", {}, "Models folder", box),
        make(`button${OUTLINED}`, { type: "submit" }, "Look there"),
      );
    }

    /** What stands in no list: a pair by name, from this machine's own browser; and the length of the context. */
    other({ here, context_length: length }) {
      const field = (label, placeholder) =>
        make("input", { type: "text", "aria-label": label, placeholder, spellcheck: "false", autocomplete: "off" });
      const target = field("Target", "Target: path, hf:owner/repo[/file] or pypi:package==version/member");
      const draft = field("Draft", "Draft: the same; empty: the best on this disk");
      const context = make("input", { type: "number", min: 64, value: length, "aria-label": "Context length" });
      const line = (does, words, ...fields) =>
        make(
          "form.dc-line",
          { onsubmit: (e) => (e.preventDefault(), does()) },
          ...fields,
          make(`button${OUTLINED}`, { type: "submit" }, words),
        );
      const asked = () => target.value.trim() && this.use({ target: target.value, draft: draft.value });
      return [
        here ? make("h3", {}, "Another one") : "",
        here ? line(asked, "Load", make("div.dc-fields", {}, target, draft)) : "",
        make("h3", {}, "Context"),
        line(
          () => this.use({ context_length: Number(context.value) }),
          "Load anew",
          make("label", {}, "Tokens of prompt and answer together", context),
        ),
      ];
    }

    async use({ target, draft, backend, context_length }) {
      const answer = await this.server.use({ target, draft, backend, context_length }).catch(() => SILENT);
      if (answer.refused) return toast(answer.refused);
      this.element.scrollTop = 0;
      return this.changed();
    }

    async foresee(does, action) {
      const answer = await this.server[does](action).catch(() => SILENT);
      if (answer.refused) toast(answer.refused);
      this.changed();
    }

    /** The forecast: the way to begin it, else what it does now and the way to end it. */
    foreseeing({ forecasting, unforeseen }) {
      if (this.foreseen === forecasting + unforeseen) return;
      if (this.foreseen && !forecasting) this.load();
      this.foreseen = forecasting + unforeseen;
      const words = forecasting ? sentence(forecasting) : unforeseen;
      const [label, ...asked] = forecasting ? ["Cancel", "cancel", { of: "forecast" }] : [FORESEE, "forecast", {}];
      this.foresight.replaceChildren(
        press(label, () => this.foresee(...asked), OUTLINED),
        make("span", { role: "status" }, words || UNKNOWN),
      );
    }

    /** What is fetched or loaded now, else what went wrong, with the way to try it again. */
    show(state) {
      this.foreseeing(state);
      const [doing, done, all] = state.choosing || (state.state === "loading" && (state.loading || ["loading"])) || [];
      const key = JSON.stringify([doing, done, all, state.error, state.failed, state.used, state.hardware.draft_fault]);
      if (this.told === key) return;
      const pair = state.used.join();
      if (this.pairs !== pair && this.pairs) this.load();
      Object.assign(this, { told: key, pairs: pair });
      this.line.replaceChildren(...(doing ? this.progress(doing, done, all, state.choosing) : this.faults(state)));
    }

    progress(doing, done, all, cancellable) {
      return [
        make("span", {}, `${sentence(doing)}${all ? `: ${amount(done)} of ${amount(all)}` : ""}`),
        make("progress.dc-progress", { max: 1, value: all ? done / all : null, "aria-label": "Progress" }),
        cancellable ? press("Cancel", () => this.server.cancel({}).then(() => this.changed()), OUTLINED) : "",
      ];
    }

    faults({ failed, error, hardware, used }) {
      const off = hardware.draft_fault && `Guessing is off: ${hardware.draft_fault}`;
      const words = failed.reason || error || off;
      if (!words) return [];
      const again = failed.reason ? failed : { target: used[0], draft: used[1], backend: used[2] };
      return [
        make(
          "div.dc-fault",
          { role: "alert", html: icon("warn") },
          make("span", {}, words),
          press("Retry", () => this.use(again), ".dc-text"),
        ),
      ];
    }
  }

  const OUTLINED = ".dc-text.dc-outlined";
  const FORESEE = "How fast would they be here?";
  const UNKNOWN = "None of these pairs has been measured here. A forecast takes some minutes and downloads nothing.";
  const LANES = { torch: "runs on torch", llama: "runs as the file is", native: "runs in C" };
  const NO_DRAFT = "No draft on this disk speaks its tokens. This makes one: ";
  const DISTILL = "python -m duochat distill --target";
  const quoted = (path) => (/[^\w@%+=:,./-]/.test(path) ? `'${path.replaceAll("'", `'\\''`)}'` : path);
  const facts = (...told) => (told[0] ? make("p.dc-facts", {}, ...told) : "");
  const sentence = (words) => words[0].toUpperCase() + words.slice(1);
  /** A model's name without what its file is made of: "gemma-3-270m-it-Q8_0" is gemma-3-270m. */
  const plainName = (name) => name.replace(/[-.](it|instruct|chat|v\d+|i?q\d\w*|bf16|f16)(?=[-.]|$)/gi, "");
  /** What a ready pair is called: the target as its description begins. */
  const titled = ({ description, name, backend }) =>
    (/^[A-Z]/.test(description) ? description.split(/ in | with | \(|, /)[0] : plainName(name)) +
    (backend === "torch" ? " on PyTorch" : "");
  const forecast = (known) => known && facts(`Here ${known.sentence}`);
  const amount = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(2)} GB` : n >= 1e6 ? `${(n / 1e6).toFixed(0)} MB` : n);

  Object.assign(window.duochat, { ModelSheet: Sheet });
})();
