/* The chat: thread, line of state and composer. duochat.chat(element, tools) draws the values that page.py sends. */
(() => {
  "use strict";
  const { make, icon, button, toast, say, copy, recall, actions, welcome } = window.duochat;
  const tab = Math.random().toString(36).slice(2);
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
      window.addEventListener("hashchange", () => this.open(decodeURIComponent(location.hash.slice(1))));
      this.open(decodeURIComponent(location.hash.slice(1)));
    }

    build(element) {
      this.thread = make("div.dc-thread", { role: "region", "aria-label": "Conversation", tabindex: "0" });
      this.list = make("div.dc-messages");
      this.thread.append(this.list);
      this.thread.addEventListener("scroll", () => this.noteScroll(), { passive: true });
      this.down = button("down", "To the end", () => this.toEnd(), "down");
      this.state = new window.duochat.State();
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
          make("div.dc-foot", {}, this.state.element, this.composer.element),
        ),
      );
      this.noteScroll();
      Object.assign(actions, {
        newChat: () => this.open(""),
        retry: () => this.last("assistant") && this.ask("retry", { message: this.last("assistant").id }),
        edit: () => this.last("user") && this.edit(this.last("user")),
        copy: () => this.last("assistant") && copy(this.last("assistant").text, this.composer.voice),
        focus: () => this.composer.focus(),
        escape: () => this.escape(),
      });
    }

    last(role) {
      return this.messages.filter((m) => m.role === role).pop();
    }

    escape() {
      const editor = document.querySelector(".dc-editor");
      if (editor) return editor.cancel();
      if (window.duochat.isOpen("settings")) return window.duochat.toggle("settings");
      if (innerWidth < 768 && window.duochat.isOpen("side-bar")) return window.duochat.toggle("side-bar");
      if (this.busy) this.stop();
    }

    /* ---- asking ---- */

    send(text) {
      if (this.busy) return (toast("An answer is being written: stop it first, or wait. Your text stays here."), false);
      if (!this.loaded) return ((this.held = text), true);
      const last = this.messages[this.messages.length - 1];
      this.ask("send", { text, after: last ? last.id : null });
      this.pretend(text);
      return true;
    }

    ask(kind, more = {}) {
      if (this.busy && kind !== "send") return toast("An answer is being written: stop it first.");
      const ticket = `${tab}-${Date.now()}`;
      const late = setTimeout(() => this.late(ticket), LATE);
      this.pending.set(ticket, { kind, late, text: more.text, conversation: this.conversation });
      this.setBusy(true);
      this.clearFaults();
      this.trigger("ask", { kind, ticket, tab, conversation: this.conversation, ...more });
    }

    /** Show the user's message at once, before the server has stored it. */
    pretend(text) {
      this.list.querySelector(".dc-empty")?.remove();
      const article = this.article({ id: "new", role: "user", text, versions: [] });
      article.classList.add("sending");
      this.list.append(article);
      this.toEnd();
    }

    refuse(ticket, why) {
      const asked = this.pending.get(ticket);
      this.settle(ticket);
      this.setBusy(false);
      this.list.querySelector(".sending")?.remove();
      if (asked?.kind === "send") this.composer.giveBack(asked.text);
      if (asked?.kind === "edit") this.composer.giveBack(asked.text);
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

    open(conversation) {
      if (!this.thread.getClientRects().length) document.getElementById("chat-tab-button")?.click();
      if (conversation && conversation === this.conversation) return;
      this.conversation = conversation;
      this.point();
      this.clearFaults();
      this.loaded = !conversation;
      this.setBusy(false);
      this.draw({ messages: [] });
      this.state.show({ phase: "idle" });
      this.composer.use(conversation);
      this.trigger("open", { conversation, tab, settings: recall("settings") });
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

    take(value) {
      const asked = value.ticket && this.pending.get(value.ticket);
      if (value.refused && value.ticket) return this.refuse(value.ticket, value.refused);
      if (value.gone && value.conversation === this.conversation) return this.gone(value.refused);
      if (value.refused) return this.fault(value.refused);
      if (asked?.kind === "send" && asked.conversation === this.conversation) this.adopt(value.conversation);
      if (asked) this.settle(value.ticket);
      if ((value.conversation || "") !== this.conversation) return;
      this.heard = Date.now();
      this.acknowledge(value.number);
      if (value.thread) {
        this.draw(value.thread);
        this.loaded = true;
        setTimeout(() => this.composer.summary(), 200);
      }
      if (value.stream) this.grow(value.stream);
      if (value.status) this.show(value.status);
      if (this.held && this.loaded && !this.busy) this.send([this.held, (this.held = "")][0]);
    }

    /** Tell the server how far the page has come, so that it never runs ahead; one word at a time. */
    async acknowledge(number) {
      this.drawn = number;
      if (this.telling || !number) return;
      this.telling = true;
      try {
        for (let told = 0; told !== this.drawn;) {
          told = this.drawn;
          await new Promise((done) => setTimeout(done, 200));
          await this.server.heard({ tab, number: (told = this.drawn) });
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
        if (this.held) this.composer.giveBack(this.held);
        this.held = "";
        this.draw({ messages: [] });
      }
      if (!this.list.querySelector(":scope > .dc-fault")) this.fault(why);
    }

    adopt(conversation) {
      if (conversation === this.conversation) return;
      this.conversation = conversation;
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
      if (was && !this.busy) {
        say(`Answer finished. ${this.last("assistant")?.text.slice(0, 600) || ""}`);
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
        const article = keep
          ? old
          : this.article(message, old?.classList.contains("live") ? old.querySelector(".dc-body") : null);
        article.signature = keep ? old.signature : signature;
        kept.set(message.id, article);
      }
      this.articles = kept;
      const faults = [...this.list.querySelectorAll(":scope > .dc-fault")];
      this.list.replaceChildren(
        ...(kept.size ? kept.values() : [welcome((text) => this.composer.fill(text))]),
        ...faults,
      );
      window.duochat.picture_?.follow(this.messages);
    }

    /** grown: the body of the same answer while it was being written, whose blocks are kept where they are right. */
    article(message, grown) {
      if (message.role === "system")
        return make("p.dc-note", {}, `System prompt of this conversation: ${message.text}`);
      const mine = message.role === "user";
      const body = grown || make("div.dc-body", { "data-testid": mine ? "user" : "bot", dir: "auto" });
      const article = make(
        `article.dc-message.${mine ? "mine" : "theirs"}`,
        { "aria-label": mine ? "You" : "Answer", "data-id": message.id },
        body,
      );
      if (mine) body.textContent = message.text;
      else this.blocks(body, 0, message.blocks || []);
      if (!mine && !message.live) for (const note of this.notes(message)) article.append(note);
      if (message.live) article.classList.add("live");
      else if (message.id !== "new") article.append(this.tools(message));
      return article;
    }

    notes(message) {
      const notes = (message.notices || []).map((words) => make("p.dc-note", {}, words));
      if (message.error)
        notes.push(make("p.dc-fault", { role: "alert", html: icon("warn") }, make("span", {}, message.error)));
      if (message.finish === "cancelled") notes.push(make("p.dc-note", {}, "Stopped."));
      if (message.finish === null) notes.push(make("p.dc-note", {}, "This answer was interrupted."));
      if (message.finish === "length") notes.push(make("p.dc-note", {}, "The answer reached its longest length."));
      return notes;
    }

    tools(message) {
      const bar = make("div.dc-tools");
      if (message.versions.length > 1) bar.append(this.versions(message));
      const copying = button("copy", "Copy", () => copy(message.text, copying));
      bar.append(
        copying,
        button("edit", "Edit", () => this.edit(message)),
      );
      if (message.role === "assistant") {
        bar.append(button("retry", "Answer again", () => this.ask("retry", { message: message.id })));
        if (message.text && message.finish !== "stop" && !message.edited)
          bar.append(
            make(
              "button.dc-text",
              { type: "button", onclick: () => this.ask("continue", { message: message.id }), html: icon("forward") },
              "Continue",
            ),
          );
        if (message.figures?.tokens)
          bar.append(
            button("lanes", "Show how it was made", () => window.duochat.picture_?.show(message.id)),
            this.figures(message.figures),
          );
      } else if (this.last("user")?.id === message.id)
        bar.append(button("undo", "Take back", () => this.undo(message)));
      return bar;
    }

    versions(message) {
      const at = message.versions.indexOf(message.id),
        all = message.versions;
      const go = (step) => async () =>
        this.accept(await this.server.choose({ conversation: this.conversation, message: all[at + step] }));
      const before = button("left", "Version before", go(-1)),
        after = button("right", "Next version", go(1));
      before.disabled = at <= 0;
      after.disabled = at >= all.length - 1;
      return make(
        "span.dc-versions",
        {},
        before,
        make("span", { "aria-label": `Version ${at + 1} of ${all.length}` }, `${at + 1}/${all.length}`),
        after,
      );
    }

    figures(f) {
      const parts = [
        `${f.tokens} tokens`,
        f.rate && `${f.rate.toFixed(1)} tok/s`,
        f.alpha && `α ${f.alpha.toFixed(2)}`,
        f.tau && `τ ${f.tau.toFixed(2)}`,
        window.duochat.decoderName(f.decoder),
      ];
      return make("span.dc-figures", {}, parts.filter(Boolean).join(" · "));
    }

    accept(thread) {
      if (!thread || thread.refused) return this.fault(thread?.refused || "The server does not answer.");
      this.draw(thread);
      if (thread.text) this.composer.giveBack(thread.text);
    }

    async undo(message) {
      if (this.busy) return toast("An answer is being written: stop it first.");
      this.accept(await this.server.change({ do: "undo", conversation: this.conversation, message: message.id }));
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
      this.blocks(body, from, blocks);
    }

    blocks(body, from, blocks) {
      blocks.forEach((html, i) => {
        let block = body.children[from + i];
        if (!block) body.append((block = make("div.dc-block")));
        if (block.source === html) return;
        block.source = html;
        const open = block.querySelector("details")?.open;
        block.innerHTML = html;
        if (open) block.querySelector("details").open = true;
        window.duochat.dress(block);
      });
      while (body.children.length > from + blocks.length) body.lastChild.remove();
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
