/* What stands around the thread: composer, editor of a message, line of state, formulas and code dressed up. */
(() => {
  "use strict";
  const { make, icon, button, copy, remember, recall } = window.duochat;
  const DECODERS = { duotree: "DuoTree", duodecoding: "DuoDecoding", speculative: "Speculative", autoregressive: "Plain" };

  /** A text box that grows with its text. */
  const growing = (box) => {
    const fit = () => {
      box.style.height = "auto";
      box.style.height = `${Math.min(box.scrollHeight, innerHeight * 0.4)}px`;
    };
    box.addEventListener("input", fit);
    requestAnimationFrame(fit);
    return fit;
  };
  const isSend = (e) => e.key === "Enter" && !e.shiftKey && !e.isComposing && e.keyCode !== 229;

  /** Text box with Send and Stop. What is typed is remembered by the browser until it is sent. */
  class Composer {
    constructor(send, stop, meter) {
      this.key = "draft.";
      this.box = make("textarea", { rows: "1", placeholder: "Message DuoChat", "aria-label": "Message", enterkeyhint: "send", maxlength: "200000" });
      this.fit = growing(this.box);
      this.sending = button("send", "Send (Enter)", () => this.submit(), "send");
      this.stopping = button("stop", "Stop (Esc)", stop, "stop");
      this.settings = make("button.dc-text.dc-now", { type: "button", title: "Settings (Alt + S)", onclick: () => window.duochat.toggle("settings"), html: icon("sliders") }, (this.now = make("span", {}, "Settings")));
      document.addEventListener("change", () => setTimeout(() => this.summary(), 150));
      this.voice = make("span.dc-hidden");
      this.element = make("form.dc-composer", { onsubmit: (e) => (e.preventDefault(), this.submit()) },
        this.box, make("div.dc-row", {}, this.settings, make("span.dc-space"), this.voice, meter, this.stopping, this.sending));
      this.onsend = send;
      this.box.addEventListener("input", () => this.note());
      this.box.addEventListener("keydown", (e) => isSend(e) && (e.preventDefault(), this.submit()));
    }

    /** The decoder and the sampling that the next answer is made with, on the button to the settings. */
    summary() {
      const chosen = (id) => document.querySelector(`#${id} input:checked`)?.value;
      const words = [DECODERS[chosen("decoder")], chosen("preset") || "Own sampling"];
      this.now.textContent = words[0] ? words.join(" · ") : "Settings";
    }

    submit() {
      const text = this.box.value;
      if (!text.trim() || !this.onsend(text)) return;
      this.fill("");
    }

    fill(text) {
      this.box.value = text;
      this.note();
      this.fit();
      this.focus();
    }

    /** A text that could not be sent comes back, before what was typed since. */
    giveBack(text) {
      const typed = this.box.value;
      this.fill(typed.trim() ? `${text}\n${typed}` : text);
    }

    note() {
      remember(this.key, this.box.value);
      this.sending.disabled = !this.box.value.trim();
    }

    use(conversation) {
      this.key = `draft.${conversation}`;
      this.box.value = recall(this.key);
      this.note();
      this.fit();
      if (matchMedia("(hover: hover)").matches) this.focus();
    }

    rename(conversation) {
      remember(this.key, "");
      this.key = `draft.${conversation}`;
      this.note();
    }

    setBusy(busy) {
      this.element.classList.toggle("busy", busy);
    }

    focus() {
      this.box.focus({ preventScroll: true });
    }
  }

  /** The editor below a message; done(text) is called with the changed text. */
  const editor = (message, done) => {
    const box = make("textarea", { "aria-label": "Edit the message" }, message.text);
    const element = make("div.dc-editor");
    const close = () => (element.parentElement?.classList.remove("editing"), element.remove());
    const finish = () => (close(), box.value !== message.text && done(box.value));
    element.cancel = close;
    const words = message.role === "user" ? "Send as a new version" : "Keep as a new version";
    element.append(box, make("div.dc-row", {}, make("span.dc-space"),
      make("button.dc-text", { type: "button", onclick: close }, "Cancel"), make("button.dc-primary", { type: "button", onclick: finish }, words)));
    box.addEventListener("keydown", (e) => isSend(e) && message.role === "user" && (e.preventDefault(), finish()));
    growing(box);
    return element;
  };

  /** Phase, speed and speculation, on one line. */
  class State {
    constructor() {
      this.phase = make("span.dc-phase");
      this.bar = make("progress.dc-progress", { max: "1", value: "0", "aria-label": "Progress" });
      this.numbers = make("span.dc-numbers");
      this.badge = make("span.dc-badge");
      this.meter = make("span.dc-meter", { hidden: true, role: "meter", "aria-label": "Context used", "aria-valuemin": "0" }, make("i"), make("b"));
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
      this.speculation(s);
      this.context(s.context);
    }

    words(s) {
      if (s.phase === "idle") return s.queue ? `The engine answers ${s.queue === 1 ? "another chat" : `${s.queue} other chats`}` : "";
      const [done, all] = s.progress || [0, 0];
      if (s.phase === "queued") return done > 1 ? `Waiting: ${done} answers before this one` : done ? "Waiting: one answer before this one" : "Waiting";
      if (s.phase === "loading") return s.doing ? s.doing[0].toUpperCase() + s.doing.slice(1) : "Loading the models";
      if (s.phase === "prefill") return all ? `Reading the prompt: ${done} of ${all} tokens` : "Reading the prompt";
      if (s.phase === "decode") return "Writing";
      return ""; // what came of it stands below the answer
    }

    figures(s) {
      const show = (name, value, digits, unit = "") => (typeof value === "number" && value > 0 ? `${name}${value.toFixed(digits)}${unit}` : "");
      return [
        show("", s.rate, 1, " tok/s"), show("α ", s.alpha, 2), show("τ ", s.tau, 2), show("first token ", s.ttft, 2, " s"),
        s.cpu !== undefined && s.phase !== "idle" ? `CPU ${Math.round(s.cpu * 100)} %` : "", s.gpu !== undefined && s.phase !== "idle" ? `GPU ${Math.round(s.gpu * 100)} %` : "",
      ].filter(Boolean).join("  ·  ");
    }

    speculation({ speculation: word = "", reason, decoder, phase }) {
      const plain = decoder === "autoregressive";
      this.badge.hidden = !word || (phase === "done" && word === "on");
      this.badge.dataset.is = word;
      this.badge.textContent = plain ? "Plain decoding" : word === "on" ? DECODERS[decoder] || "" : `Speculation ${word === "warming" ? "starts" : word === "off" ? "off" : "paused"}${reason && word !== "on" ? `: ${reason}` : ""}`;
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

  /* ---- code and formulas ---- */

  let typesetter;
  const katex = () => (typesetter ??= import(document.querySelector("meta[name=katex]")?.content || "./missing.js"));
  const typeset = async (node) => {
    const tex = node.textContent;
    try {
      const { default: tool } = await katex();
      tool.render(tex, node, { displayMode: node.classList.contains("display"), throwOnError: false, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 });
    } catch {
      node.classList.add("raw");
    }
  };

  /** Give code blocks their header, formulas their shape, tables room to scroll. */
  const dress = (block) => {
    for (const pre of block.querySelectorAll("pre")) {
      const taking = button("copy", "Copy the code", () => copy(pre.querySelector("code").textContent, taking));
      pre.before(make("div.dc-code-head", {}, make("span", {}, pre.dataset.language || "text"), taking));
      pre.tabIndex = 0;
    }
    for (const table of block.querySelectorAll("table")) {
      const frame = make("div.dc-table", { tabindex: "0", role: "group", "aria-label": "Table" });
      table.replaceWith(frame);
      frame.append(table);
    }
    block.querySelectorAll(".math").forEach(typeset);
  };

  Object.assign(window.duochat, { Composer, State, editor, dress, DECODERS });
})();
