/* The picture's one tooltip. */
(() => {
  "use strict";
  const { make, shown, percent, isNumber } = window.duochat;

  class Tip {
    constructor(host) {
      this.host = host;
      this.id = `dp-tip-${(Tip.count = (Tip.count || 0) + 1)}`;
      this.node = make("div.dp-tip", { role: "tooltip", id: this.id, hidden: true });
      host.append(this.node);
    }

    /** Show content beside a box given in client coordinates. */
    show(box, content, anchor = null) {
      this.node.replaceChildren(...content);
      this.node.hidden = false;
      this.anchor?.removeAttribute("aria-describedby");
      this.anchor = anchor;
      anchor?.setAttribute("aria-describedby", this.id);
      const host = this.host.getBoundingClientRect();
      const [width, height] = [this.node.offsetWidth, this.node.offsetHeight];
      const left = Math.min(Math.max(box.left - host.left, 4), Math.max(4, host.width - width - 4));
      const below = box.bottom + 6 + height < innerHeight || box.top - height - 6 < 0;
      this.node.style.left = `${left}px`;
      this.node.style.top = `${(below ? box.bottom + 6 : box.top - height - 6) - host.top}px`;
    }

    hide() {
      this.node.hidden = true;
      this.anchor?.removeAttribute("aria-describedby");
      this.anchor = null;
    }
  }

  function tipContent([heading, words, facts]) {
    const list = make("dl", {}, ...facts.flatMap(([k, v]) => [make("dt", { text: k }), make("dd", { text: v })]));
    return [
      make("strong", { text: heading }),
      words ? make("p", { text: words }) : null,
      facts.length ? list : null,
    ].filter(Boolean);
  }

  /** The unfolded chip: every rejected and ignored token of a round. */
  function discardedContent(answer, round) {
    const item = (id, fate) => {
      const draft = answer.drafts.get(id);
      if (!draft) return null;
      const ahead = draft.position - (round.position || 0) + 1;
      const share = isNumber(draft.targetProb) && fate === "rejected" ? ` · target ${percent(draft.targetProb)}` : "";
      return make(
        `li.dp-${fate}`,
        {},
        make("s", { data: { text: fate === "ignored" ? `[${shown(draft.text)}]` : shown(draft.text) } }),
        make("small", {
          text: `place ${ahead} · draft ${percent(draft.prob)}${share}${draft.origin === "ngram" ? " · n-gram" : ""}`,
        }),
      );
    };
    const part = (title, ids, fate) =>
      ids.length
        ? [
            make("p", { text: title }),
            make("ul", {}, ...ids.slice(0, 12).map((id) => item(id, fate))),
            ids.length > 12 ? make("small", { text: `and ${ids.length - 12} more` }) : null,
          ]
        : [];
    return [
      make("strong", { text: `Round ${round.index + 1}: drafted and thrown away` }),
      ...part("Rejected: the target chose another token there", round.rejected, "rejected"),
      ...part(
        "Left untested: never reached, an earlier token was rejected or another branch won",
        round.ignored,
        "ignored",
      ),
    ].filter(Boolean);
  }

  Object.assign(window.duochat, { Tip, tipContent, discardedContent });
})();
