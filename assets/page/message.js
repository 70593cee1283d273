/* One message of the thread: its text, what is noted of it, and its tools. */
(() => {
  "use strict";
  const { make, icon, button, askFirst, copy, decoderName } = window.duochat;

  /** chat: does what the tools ask for. grown: the body of the same answer while it was being written, whose blocks are
   * kept where they are right. */
  function article(chat, message, grown) {
    if (message.role === "system") return make("p.dc-note", {}, `System prompt of this conversation: ${message.text}`);
    const mine = message.role === "user";
    const body = grown || make("div.dc-body", { "data-testid": mine ? "user" : "bot", dir: "auto" });
    const node = make(
      `article.dc-message.${mine ? "mine" : "theirs"}`,
      { "aria-label": mine ? "You" : "Answer", "data-id": message.id },
      body,
    );
    if (mine) body.textContent = message.text;
    else fill(body, 0, message.blocks || []);
    if (!mine && !message.live) node.append(...notes(message));
    if (message.live) node.classList.add("live");
    else if (message.id !== "new") node.append(tools(chat, message));
    return node;
  }

  /** Blocks of rendered text from a number on; one that has not changed stays as it is. */
  function fill(body, from, blocks) {
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

  const ENDS = {
    cancelled: "Stopped.",
    null: "This answer was interrupted.",
    length: "The answer reached its longest length.",
  };

  function notes({ notices = [], error, finish }) {
    const told = [...notices, ...(finish in ENDS ? [ENDS[finish]] : [])].map((words) => make("p.dc-note", {}, words));
    if (error) told.push(make("p.dc-fault", { role: "alert", html: icon("warn") }, make("span", {}, error)));
    return told;
  }

  const LOST = "It is gone for good. What follows it stays; of one version among several it goes too.";

  function tools(chat, message) {
    const copying = button("copy", "Copy", () => copy(message.text, copying));
    const answer = message.role === "assistant";
    const made = message.figures?.tokens;
    return make(
      "div.dc-tools",
      {},
      message.versions.length > 1 ? versions(chat, message) : null,
      copying,
      button("edit", "Edit", () => chat.edit(message)),
      answer ? button("retry", "Answer again", () => chat.retry(message)) : null,
      answer && message.text && message.finish !== "stop" && !message.edited ? going(chat, message) : null,
      made ? button("lanes", "Show how it was made", () => window.duochat.picture_?.show(message.id)) : null,
      made ? button("export", "Save this answer as a page", () => chat.share(message)) : null,
      !answer && chat.last("user")?.id === message.id ? button("undo", "Take back", () => chat.undo(message)) : null,
      button("trash", "Delete", () => askFirst("Delete this message?", LOST, "Delete", () => chat.delete(message))),
      made ? figures(message.figures) : null,
    );
  }

  const going = (chat, message) =>
    make(
      "button.dc-text",
      { type: "button", onclick: () => chat.ask("continue", { message: message.id }), html: icon("forward") },
      "Continue",
    );

  function versions(chat, message) {
    const at = message.versions.indexOf(message.id),
      all = message.versions;
    const go = (step) => async () =>
      chat.accept(await chat.server.choose({ conversation: chat.conversation, message: all[at + step] }));
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

  /** How fast it was; the rest of its figures is told on request. */
  function figures(f) {
    const brief = [f.rate && `${f.rate.toFixed(0)} tokens/s`, f.speedup && `${f.speedup.toFixed(f.speedup < 1 ? 2 : 1)}× plain`];
    const more = [
      `${f.tokens} tokens`,
      f.alpha && `α ${f.alpha.toFixed(2)}`,
      f.tau && `τ ${f.tau.toFixed(2)}`,
      decoderName(f.decoder),
    ];
    const said = (parts) => parts.filter(Boolean).join(" · ");
    const whole = said([...brief, ...more]);
    return make("span.dc-figures", { role: "note", title: whole, "aria-label": whole }, said(brief));
  }

  Object.assign(window.duochat, { article, fill });
})();
