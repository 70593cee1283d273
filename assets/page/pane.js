/* The pane beside the chat: the picture of one answer and its tint in the chat's text; before the first, the moving picture. */
(() => {
  "use strict";
  const { make, button, toast, actions, plural, Demo, Origins, Picture, Tip, Travel } = window.duochat;

  class Pane {
    constructor(element, { server }) {
      this.server = server;
      this.place = make("div.dc-picture");
      this.note = make("p.dc-note");
      this.blank = make("div.dc-blank", {}, this.note, new Demo(() => this.learn()).node);
      element.replaceChildren(
        make(
          "div.dc-bar",
          {},
          make("b", {}, "Live picture"),
          button("close", "Close the live picture", () => actions.togglePicture()),
        ),
        this.blank,
        this.place,
      );
      this.picture = new Picture(this.place);
      this.tint();
      this.clear();
      this.use(window.duochat.head_?.state || {});
      actions.togglePicture = () =>
        document.body.classList.toggle(matchMedia("(max-width: 1099px)").matches ? "dc-show-picture" : "dc-no-picture");
    }

    /** The answer's text carries its tokens' origins; a switch in the legend turns that off. */
    tint() {
      if (!window.CSS?.highlights) return; // an older browser: the picture alone
      const layer = document.body.appendChild(make("div.dp.dc-tips"));
      this.picture.origins = new Origins(
        this.picture,
        new Tip(layer),
        () => this.body(),
        () => this.before(),
      );
      this.picture.travel = new Travel(this.picture, layer);
      const box = make("input", { type: "checkbox", role: "switch", onchange: () => this.picture.origins.turn(box.checked) });
      box.checked = this.picture.origins.on;
      this.picture.legend.append(make("label.dp-switch", {}, box, "Tint the answer"));
    }

    /** The rendered answer in the chat whose tokens the picture shows. */
    body() {
      return window.duochat.chat_?.articles.get(this.message)?.querySelector(".dc-body") || null;
    }

    /** What stood in that answer before its first token: an answer that was continued. */
    before() {
      const { text = "", before = "", live } = window.duochat.chat_.messages.find((m) => m.id === this.message) || {};
      const drawn = this.picture.answer.text;
      return live ? before : text.endsWith(drawn) ? text.slice(0, text.length - drawn.length) : "";
    }

    /** state: what the models' state says of the devices. */
    use({ hardware = {}, exact }) {
      const { draft_threads: threads, target_device: target, shares_cores: shares } = hardware;
      this.picture.use({ draft: threads ? `CPU, ${plural(threads, "thread")}` : "", target, shares, exact });
    }

    /** A frame of the answer that is being written. */
    take(message, frame) {
      this.message = message;
      this.draw(frame);
    }

    draw(frame) {
      this.empty(false);
      if (!this.picture.update(frame)) this.of(this.message);
    }

    empty(empty, words = "") {
      this.place.hidden = empty;
      this.blank.hidden = !empty;
      this.note.textContent = words;
    }

    /** The picture of an answer, brought into view. */
    show(message) {
      document.body.classList.remove("dc-no-picture");
      document.body.classList.add("dc-show-picture");
      this.of(message);
    }

    async of(message) {
      if (this.asked === message) return;
      if (this.message !== message) this.picture.update({ from: 0, n: 0 });
      this.asked = this.message = message;
      const { conversation } = window.duochat.chat_;
      const answer = await this.server
        .picture({ conversation, message })
        .catch(() => ({ refused: "The server does not answer." }));
      if (this.asked === message) this.asked = null;
      if (this.message !== message) return; // another one was asked for meanwhile
      if (answer.refused) toast(answer.refused);
      else if (answer.n) this.draw(answer);
    }

    /** The thread has changed: the picture is of an answer that is in it. */
    follow(messages) {
      if (!this.message || messages.some((m) => m.id === this.message)) return;
      const last = messages.findLast((m) => m.role === "assistant");
      if (last?.figures?.tokens) this.of(last.id);
      else if (!last?.live)
        this.clear(last?.edited ? "This version was written by hand: there is nothing to show of it." : "");
    }

    clear(words = "") {
      document.body.classList.remove("dc-show-picture");
      this.message = null;
      this.picture.update({ from: 0, n: 0 });
      this.empty(true, words);
    }

    learn() {
      document.getElementById("learn-tab-button")?.click();
    }
  }

  window.duochat.picture = (element, tools) => (window.duochat.picture_ = new Pane(element, tools));
})();
