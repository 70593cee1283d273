/* The line of state between thread and composer: phase, progress, speed, guessing, and the context's meter. */
(() => {
  "use strict";
  const { make, capital, decoderName } = window.duochat;

  /** Phase, speed and guessing, on one line. */
  class State {
    constructor() {
      this.phase = make("span.dc-phase");
      this.bar = make("progress.dc-progress", { max: "1", value: "0", "aria-label": "Progress" });
      this.numbers = make("span.dc-numbers");
      this.badge = make("span.dc-badge");
      this.meter = make(
        "span.dc-meter",
        { hidden: true, role: "meter", "aria-label": "Context used", "aria-valuemin": "0" },
        make("i"),
        make("b"),
      );
      this.element = make("div.dc-state", { "aria-live": "off" }, this.phase, this.bar, this.badge, this.numbers);
      this.show({ phase: "idle" });
    }

    show(s) {
      const words = this.words(s);
      if (this.phase.textContent !== words) this.phase.textContent = words;
      this.element.dataset.phase = s.phase;
      const [done, all] = s.progress || [0, 0];
      this.bar.hidden = !all || !["loading", "prefill"].includes(s.phase);
      if (all) this.bar.value = done / all;
      const over = s.phase === "done" || s.phase === "idle";
      this.numbers.textContent = over ? "" : this.figures(s);
      this.guessing(s);
      this.context(s.context);
    }

    words(s) {
      if (s.phase === "idle")
        return s.queue ? `The engine answers ${s.queue === 1 ? "another chat" : `${s.queue} other chats`}` : "";
      const [done, all] = s.progress || [0, 0];
      if (s.phase === "queued")
        return done > 1
          ? `Waiting: ${done} answers before this one`
          : done
            ? "Waiting: one answer before this one"
            : "Waiting";
      if (s.phase === "loading") return s.doing ? capital(s.doing) : "Loading the models";
      if (s.phase === "prefill") return all ? `Reading the prompt: ${done} of ${all} tokens` : "Reading the prompt";
      if (s.phase === "decode") return "Writing";
      return ""; // what came of it stands below the answer
    }

    /** The picture beside the chat has the rest. */
    figures({ rate, ttft }) {
      const told = [rate && `${rate.toFixed(1)} tok/s`, ttft && `first token after ${ttft.toFixed(2)} s`];
      return told.filter(Boolean).join("  ·  ");
    }

    /** Whether the draft guesses, while an answer is written; the picture has the whole reason. */
    guessing({ speculation: word = "", reason, decoder, phase }) {
      this.badge.hidden = !word || phase !== "decode";
      this.badge.dataset.is = word;
      this.badge.title = reason || "";
      this.badge.textContent =
        decoder === "autoregressive"
          ? "Plain decoding"
          : { warming: "Guessing starts soon", paused: "Guessing paused: no gain here", off: "No guessing" }[word] ||
            decoderName(decoder);
    }

    context([used, all] = [0, 0]) {
      this.meter.hidden = !all;
      if (!all) return;
      this.meter.classList.toggle("used", used > 0);
      this.meter.firstChild.style.setProperty("--share", Math.min(1, used / all));
      this.meter.lastChild.textContent = `${Math.round((100 * used) / all)} %`;
      this.meter.title = `Context: ${used.toLocaleString("en")} of ${all.toLocaleString("en")} tokens`;
      this.meter.setAttribute("aria-valuenow", used);
      this.meter.setAttribute("aria-valuemax", all);
      this.meter.classList.toggle("full", used > 0.9 * all);
    }

    stopping() {
      this.phase.textContent = "Stopping";
    }

    lost() {
      this.phase.textContent = "The connection is lost. What was written is kept; trying again";
    }
  }

  Object.assign(window.duochat, { State });
})();
