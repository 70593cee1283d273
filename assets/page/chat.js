/* The chat: thread, line of state and composer. duochat.chat(element, tools) draws the values that view.py sends. */
(() => {
  "use strict";
  const { make, icon, button, toast, say, copy, save, remember, recall, actions, welcome, article, fill, ended } =
    window.duochat;
  const SILENCE = 6000; // ms without a word during an answer before the page asks what is wrong
  const LATE = 8000; // ms without a word after something was asked
  class Chat {
    constructor(element, { props, trigger, watch, server }) {
      Object.assign(this, {
        props,
        trigger,
        server,
        conversation: "",
        messages: [],
        articles: new Map(),
        pending: new Map(),
      });
      this.busy = false;
      this.heard = 0;
      this.build(element);
      watch("value", () => this.props.value && this.take(JSON.parse(this.props.value)));
      setInterval(() => this.listen(), 1000);
      window.addEventListener("hashchange", () => this.follow());
      this.follow();
    }

    build(element) {
      this.thread = make("div.dc-thread", { role: "region", "aria-label": "Conversation", tabindex: "0" });
      this.list = make("div.dc-messages");
      this.thread.append(this.list);
      this.thread.addEventListener("scroll", () => this.noteScroll(), { passive: true });
      this.down = button("down", "To the end", () => this.toEnd(), "down");
      this.state = new window.duochat.State();
      this.waiting = make("div.dc-queue", { role: "group", "aria-label": "Messages that wait" });
      this.queue = [];
      this.composer = new window.duochat.Composer(
        (text) => this.send(text),
        () => this.stop(),
        this.state.meter,
      );
      element.replaceChildren(
        make(
          "div.dc-chat",
          {},
          this.thread,
          this.down,
          make("div.dc-foot", {}, this.state.element, this.waiting, this.composer.element),
        ),
      );
      this.noteScroll();
      Object.assign(actions, {
        newChat: () => this.open(""),
        retry: () => this.last("assistant") && this.retry(this.last("assistant")),
        edit: () => this.last("user") && this.edit(this.last("user")),
        copy: () => this.last("assistant") && copy(this.last("assistant").text, this.composer.voice),
        focus: () => (this.come(), setTimeout(() => this.composer.focus())),
        escape: () => this.escape(),
      });
    }

    /** The address names a conversation, or a place in another tab. */
    follow() {
      const hash = decodeURIComponent(location.hash.slice(1));
      const tab = hash.includes("/") && document.getElementById(`${hash.split("/")[0]}-tab-button`);
      if (!tab) return this.open(hash);
      if (!this.loaded) this.open("", false);
      return tab.click();
    }

    last(role) {
      return this.messages.filter((m) => m.role === role).pop();
    }

    escape() {
      if (window.duochat.isOpen("settings")) return window.duochat.toggle("settings");
      if (innerWidth < 768 && window.duochat.isOpen("side-bar")) return window.duochat.toggle("side-bar");
      if (document.querySelector(".dc-bar")?.getClientRects().length) return actions.togglePicture();
      const editor = document.querySelector(".dc-editor");
      if (editor) return editor.cancel();
      if (this.busy) this.stop();
    }

    /* ---- asking ---- */

    send(text) {
      if (this.busy || !this.loaded) return (this.wait(...this.queue, text), true);
      const last = this.messages[this.messages.length - 1];
      this.ask("send", { text, after: last ? last.id : null });
      this.pretend(text);
      return true;
    }

    /** The messages that are sent when the answer is finished, in this order. */
    wait(...queue) {
      this.queue = queue;
      remember(`queue.${this.conversation}`, queue.length ? JSON.stringify(queue) : "");
      this.waiting.replaceChildren(
        ...queue.map((text, i) =>
          make(
            "p.dc-queued",
            {},
            make("b", {}, "Next"),
            make("span", {}, text),
            button("close", "Take it back", () => {
              this.wait(...queue.toSpliced(i, 1));
              this.composer.giveBack(text);
            }),
          ),
        ),
      );
    }

    /** Nothing more is sent by itself: the texts go back where they were written. */
    unqueue() {
      const queue = this.queue;
      this.wait();
      for (const text of queue.toReversed()) this.composer.giveBack(text);
    }

    ask(kind, more = {}) {
      if (this.busy && kind !== "send") return toast("An answer is being written: stop it first.");
      const ticket = String(performance.now());
      const late = setTimeout(() => this.late(ticket), LATE);
      this.pending.set(ticket, { kind, late, text: more.text, conversation: this.conversation });
      this.setBusy(true);
      this.clearFaults();
      this.trigger("ask", { kind, ticket, conversation: this.conversation, ...more });
    }

    /** Another version, with another seed unless that is pinned. */
    retry(message) {
      this.ask("retry", { message: message.id, pinned: Boolean(document.querySelector("#pinned input")?.checked) });
    }

    /** Show the user's message at once, before the server has stored it. */
    pretend(text) {
      this.list.querySelector(".dc-empty")?.remove();
      const sending = article(this, { id: "new", role: "user", text, versions: [] });
      sending.classList.add("sending");
      this.list.append(sending);
      this.toEnd();
    }

    refuse(ticket, why) {
      const asked = this.pending.get(ticket);
      this.settle(ticket);
      this.setBusy(false);
      this.list.querySelector(".sending")?.remove();
      if (asked?.kind === "send") this.composer.giveBack(asked.text);
      if (asked?.kind === "edit") this.composer.giveBack(asked.text);
      this.unqueue();
      this.fault(why);
      if (this.conversation) this.resync();
    }

    /** Nothing was heard of what was asked: did the server never get it, or is only its way back broken? */
    async late(ticket) {
      const asked = this.pending.get(ticket);
      const thread = await this.server.look({ conversation: this.conversation }).catch(() => null);
      if (!thread)
        return this.refuse(
          ticket,
          "The server does not answer. Your text is kept: see whether DuoChat still runs, then send again.",
        );
      if (thread.refused) return this.refuse(ticket, thread.refused);
      const got = thread.messages.filter((m) => m.role === "user").pop()?.text === asked?.text;
      if (!got && asked?.text) this.composer.giveBack(asked.text);
      location.reload();
    }

    /** Gradio could not hand a message to the server. */
    failed() {
      for (const ticket of [...this.pending.keys()])
        this.refuse(ticket, "The message could not be sent: look at the settings, then send again. Your text is kept.");
    }

    settle(ticket) {
      clearTimeout(this.pending.get(ticket)?.late);
      this.pending.delete(ticket);
    }

    async stop() {
      this.state.stopping();
      try {
        await this.server.stop({ conversation: this.conversation });
      } catch {
        this.fault("The server could not be reached to stop the answer.");
      }
    }

    /** Bring the chat into view. */
    come() {
      if (!this.thread.getClientRects().length) document.getElementById("chat-tab-button")?.click();
    }

    /** shown: bring the chat into view, and say in the address which one it is. */
    open(conversation, shown = true) {
      if (shown) this.come();
      if (conversation && conversation === this.conversation) return;
      this.conversation = conversation;
      this.live?.close();
      if (shown) this.point();
      this.clearFaults();
      this.loaded = !conversation;
      this.setBusy(false);
      this.draw({ messages: [] });
      this.state.show({ phase: "idle" });
      this.composer.use(conversation);
      this.wait(...JSON.parse(recall(`queue.${conversation}`) || "[]"));
      this.trigger("open", { conversation, settings: recall("settings") });
      window.duochat.side_?.mark(conversation);
      window.duochat.picture_?.clear();
    }

    point() {
      history.replaceState(
        null,
        "",
        this.conversation ? `#${encodeURIComponent(this.conversation)}` : location.pathname + location.search,
      );
    }

    /* ---- hearing ---- */

    /** The answer to a question: refused, or where the conversation is heard. */
    take(value) {
      const asked = value.ticket && this.pending.get(value.ticket);
      if (value.refused && value.ticket) return this.refuse(value.ticket, value.refused);
      if (value.gone && value.conversation === this.conversation) return this.gone(value.refused);
      if (value.refused) return this.fault(value.refused);
      if (asked?.kind === "send" && asked.conversation === this.conversation) this.adopt(value.conversation);
      if (asked) this.settle(value.ticket);
      if ((value.conversation || "") === this.conversation) this.attend(value.live);
    }

    /** Hear the conversation at the server's address `live/KEY`, until there is nothing more to hear. */
    attend(key) {
      this.live?.close();
      const live = (this.live = new EventSource(`live/${key}`));
      live.onmessage = ({ data }) => this.hear(JSON.parse(data), key);
      live.addEventListener("end", () => live.close());
    }

    hear(value, key) {
      this.heard = Date.now();
      if (value.refused) return this.fault(value.refused);
      this.acknowledge(key, value.number);
      if (value.thread) {
        this.draw(value.thread);
        this.loaded = true;
        setTimeout(() => this.composer.summary(), 200);
      }
      if (value.stream) this.grow(value.stream);
      if (value.frame) window.duochat.picture_?.take(value.message, value.frame);
      if (value.status) this.show({ ...value.status, rate: value.frame?.gauges.now });
      if (this.queue.length && this.loaded && !this.busy) this.sendNext();
    }

    sendNext() {
      const [text, ...rest] = this.queue;
      this.wait(...rest);
      this.send(text);
    }

    /** Tell the server how far the page has come, so that it never runs ahead; one word at a time. */
    async acknowledge(key, number) {
      this.drawn = { key, number };
      if (this.telling) return;
      this.telling = true;
      try {
        for (let told; told !== this.drawn;) {
          await new Promise((done) => setTimeout(done, 200));
          told = this.drawn;
          await fetch(`live/${told.key}`, { method: "POST", body: told.number });
        }
      } catch {
        /* listen() finds out */
      } finally {
        this.telling = false;
      }
    }

    /** The conversation is not on the server: what is on screen stays, an empty page becomes a new chat. */
    gone(why) {
      this.setBusy(false);
      if (!this.messages.length) {
        this.conversation = "";
        this.point();
        this.loaded = true;
        this.composer.rename("");
        this.unqueue();
        this.draw({ messages: [] });
      }
      if (!this.list.querySelector(":scope > .dc-fault")) this.fault(why);
    }

    adopt(conversation) {
      if (conversation === this.conversation) return;
      const queue = this.queue;
      this.wait();
      this.conversation = conversation;
      this.wait(...queue);
      this.point();
      this.composer.rename(conversation);
      window.duochat.side_?.changed(conversation);
    }

    show(status) {
      const was = this.busy;
      this.setBusy(!["idle", "done"].includes(status.phase));
      this.state.show(status);
      this.mention(status.notices);
      window.duochat.pace = status.pace > 0.1 ? 1000 * status.pace : 30; // ms between two pictures
      if (status.phase === "idle") this.remind();
      if (["cancelled", "error"].includes(status.finish)) this.unqueue();
      if (was && !this.busy) {
        say(`Answer ${ended(status.finish)}. ${this.last("assistant")?.text.slice(0, 600) || ""}`);
        window.duochat.side_?.changed();
      }
    }

    /** Notices of a running answer, as they come. */
    mention(notices = []) {
      const live = this.list.querySelector(".dc-message.live");
      if (live)
        for (const words of notices.slice(live.querySelectorAll(".dc-note").length))
          live.append(make("p.dc-note", {}, words));
    }

    /** Beside a conversation just opened stands the picture of its last answer. */
    remind() {
      const last = this.last("assistant"),
        picture = window.duochat.picture_;
      if (last?.figures?.tokens && picture && picture.message !== last.id) picture.of(last.id);
    }

    setBusy(busy) {
      this.busy = busy;
      this.heard = Date.now();
      document.body.classList.toggle("dc-busy", busy);
      this.composer.setBusy(busy);
    }

    /** Is somebody still there? Called every second. Gradio does not take up a broken stream again: a reload does. */
    async listen() {
      if (!this.busy || this.pending.size || this.asking || Date.now() - this.heard < SILENCE) return;
      this.asking = true;
      try {
        await this.server.look({ conversation: this.conversation });
        location.reload();
      } catch {
        this.state.lost();
        this.heard = Date.now() - SILENCE + 2000;
      } finally {
        this.asking = false;
      }
    }

    /* ---- drawing ---- */

    draw(thread) {
      this.messages = thread.messages || [];
      const kept = new Map();
      for (const message of this.messages) {
        const signature = JSON.stringify(message);
        const old = this.articles.get(message.id);
        const keep = old && (old.signature === signature || old.querySelector(".dc-editor"));
        const drawn = keep
          ? old
          : article(this, message, old?.classList.contains("live") ? old.querySelector(".dc-body") : null);
        drawn.signature = keep ? old.signature : signature;
        kept.set(message.id, drawn);
      }
      this.articles = kept;
      const faults = [...this.list.querySelectorAll(":scope > .dc-fault")];
      this.list.replaceChildren(
        ...(kept.size ? kept.values() : [welcome((text) => this.composer.fill(text))]),
        ...faults,
      );
      window.duochat.picture_?.follow(this.messages);
    }

    accept(thread) {
      if (!thread || thread.refused) return this.fault(thread?.refused || "The server does not answer.");
      this.draw(thread);
      if (thread.text) this.composer.giveBack(thread.text);
    }

    async undo(message) {
      if (this.busy) return toast("An answer is being written: stop it first.");
      this.accept(await this.server.undo({ conversation: this.conversation, message: message.id }));
    }

    async delete(message) {
      this.accept(await this.server.remove({ conversation: this.conversation, message: message.id }));
    }

    /** One answer as a page of its own: question, tinted text, lanes. */
    async share(message) {
      const answer = await this.server.share({ conversation: this.conversation, message: message.id });
      if (answer?.refused) toast(answer.refused);
      else save(answer.name, answer.html, "text/html");
    }

    edit(message) {
      if (this.busy) return toast("An answer is being written: stop it first.");
      const article = this.articles.get(message.id);
      if (!article || article.querySelector(".dc-editor")) return;
      const editor = window.duochat.editor(message, (text) => this.ask("edit", { message: message.id, text }));
      article.append(editor);
      article.classList.add("editing");
      editor.querySelector("textarea").focus();
    }

    /** The growing answer: blocks from the first that changed. */
    grow({ message, from, blocks }) {
      const article = this.articles.get(message);
      const body = article?.querySelector(".dc-body");
      if (!body || body.children.length < from) return this.resync();
      fill(body, from, blocks);
    }

    async resync() {
      if (this.syncing) return;
      this.syncing = true;
      try {
        const thread = await this.server.look({ conversation: this.conversation });
        if (thread.refused) this.gone(thread.refused);
        else this.draw(thread);
      } finally {
        this.syncing = false;
      }
    }

    fault(words) {
      this.list.append(make("p.dc-fault", { role: "alert", html: icon("warn") }, make("span", {}, words)));
      this.toEnd();
    }

    clearFaults() {
      this.list.querySelectorAll(":scope > .dc-fault").forEach((n) => n.remove());
    }

    /** The thread grows from its end (column-reverse), so the end is at 0 and stays in view without a script. */
    toEnd() {
      this.thread.scrollTop = 0;
    }

    noteScroll() {
      this.down.classList.toggle("shown", this.thread.scrollTop < -80);
    }
  }

  window.duochat.chat = (element, tools) => (window.duochat.chat_ = new Chat(element, tools));
})();
