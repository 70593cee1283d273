/* Where people write: the composer below the thread, and the editor of a message. */
(() => {
  "use strict";
  const { make, icon, button, toast, remember, recall, decoderName, openPrompts } = window.duochat;
  const LONGEST = 200_000; // characters of a message, as the server takes

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
      this.box = make("textarea", {
        id: "message",
        rows: "1",
        placeholder: "Message DuoChat",
        "aria-label": "Message",
        enterkeyhint: "send",
        maxlength: `${LONGEST}`,
      });
      this.fit = growing(this.box);
      this.sending = button("send", "Send (Enter)", () => this.submit(), "send");
      this.stopping = button("stop", "Stop (Esc)", stop, "stop");
      this.settings = make(
        "button.dc-text.dc-now",
        {
          type: "button",
          title: "Settings (Alt + S)",
          onclick: () => window.duochat.toggle("settings"),
          html: icon("sliders"),
        },
        (this.now = make("span", {}, "Settings")),
      );
      document.addEventListener("change", () => setTimeout(() => this.summary(), 150));
      this.voice = make("span.dc-hidden");
      this.element = make(
        "form.dc-composer",
        { onsubmit: (e) => (e.preventDefault(), this.submit()) },
        this.box,
        make(
          "div.dc-row",
          {},
          ...this.adding(),
          this.settings,
          make("span.dc-space"),
          this.voice,
          meter,
          this.stopping,
          this.sending,
        ),
      );
      this.element.addEventListener("dragover", (e) => e.dataTransfer.types.includes("Files") && e.preventDefault());
      this.element.addEventListener("drop", (e) => this.received(e, e.dataTransfer.files));
      this.box.addEventListener("paste", (e) => this.received(e, e.clipboardData.files));
      this.onsend = send;
      this.box.addEventListener("input", () => this.note());
      this.box.addEventListener("keydown", (e) => isSend(e) && (e.preventDefault(), this.submit()));
    }

    /** Buttons that put text into the box: files, and prompts kept for later. */
    adding() {
      const choose = make("input", { type: "file", multiple: true, hidden: true, "aria-label": "Text files" });
      choose.addEventListener("change", async () => (await this.add(choose.files), (choose.value = "")));
      return [
        choose,
        button("clip", "Add text files", () => choose.click()),
        button("book", "Prompts", () =>
          openPrompts(
            () => this.box.value,
            (text) => this.fill(text),
          ),
        ),
      ];
    }

    received(event, files) {
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    }

    /** Text files, each as a block of code with its name, below what is typed. */
    async add(files) {
      for (const file of files) {
        const text = file.size > 4 * LONGEST ? "" : await file.text();
        if (!text || /[\0\ufffd]/.test(text)) toast(`${file.name} holds no text that can be read here.`);
        else if (this.box.value.length + text.length > LONGEST)
          toast(`${file.name} does not fit: a message holds ${LONGEST.toLocaleString("en")} characters.`);
        else this.fill(`${this.box.value}${this.box.value ? "\n\n" : ""}${fenced(file.name, text)}\n`);
      }
    }

    /** The decoder and the sampling that the next answer is made with, on the button to the settings. */
    summary() {
      const chosen = (id) => document.querySelector(`#${id} input:checked`)?.value;
      const words = [decoderName(chosen("decoder")), chosen("preset") || "Own sampling"];
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

  /** A block of code with the file's name; its fence is longer than any within. */
  const fenced = (name, text) => {
    const fence = "`".repeat(Math.max(3, ...(text.match(/`+/g) || []).map((ticks) => ticks.length + 1)));
    return `${name}\n${fence}${name.includes(".") ? name.split(".").pop() : ""}\n${text.replace(/\n$/, "")}\n${fence}`;
  };

  /** The editor below a message; done(text) is called with the changed text. */
  const editor = (message, done) => {
    const box = make("textarea", { "aria-label": "Edit the message" }, message.text);
    const element = make("div.dc-editor");
    const close = () => (element.parentElement?.classList.remove("editing"), element.remove());
    const finish = () => (close(), box.value !== message.text && done(box.value));
    element.cancel = close;
    const words = message.role === "user" ? "Send as a new version" : "Keep as a new version";
    element.append(
      box,
      make(
        "div.dc-row",
        {},
        make("span.dc-space"),
        make("button.dc-text", { type: "button", onclick: close }, "Cancel"),
        make("button.dc-primary", { type: "button", onclick: finish }, words),
      ),
    );
    box.addEventListener("keydown", (e) => isSend(e) && message.role === "user" && (e.preventDefault(), finish()));
    growing(box);
    return element;
  };

  Object.assign(window.duochat, { Composer, editor });
})();
