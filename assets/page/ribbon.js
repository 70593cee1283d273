/* The ribbon: the answer token by token. Its textContent is the answer; marks, waiting and discarded tokens are
 * generated content. Words enter as textContent or attributes, never as markup. */
(() => {
  "use strict";
  const { make, plural, percent, quoted, origin, describeToken, tipContent, discardedContent } = window.duochat;

  class Ribbon {
    /** picture: {answer, tip, select(round)}. */
    constructor(picture) {
      this.picture = picture;
      this.text = make("div.dp-text");
      this.ghosts = make("span.dp-ghosts", { "aria-hidden": "true" });
      this.node = make(
        "div.dp-ribbon",
        {
          tabindex: "0",
          role: "group",
          "aria-live": "off",
          "aria-label": "The answer, token by token. Arrow keys move from token to token.",
          onpointermove: (e) => this.point(e.target), // a text that moves under a resting pointer sends none
          onpointerleave: () => this.rest(),
          onclick: (e) => this.click(e.target),
          onkeydown: (e) => this.key(e),
          onfocusin: (e) => this.focusin(e.target),
          onfocusout: () => picture.tip.hide(),
          oncopy: (e) => this.copy(e),
          onscroll: () => this.scrolled(),
          onwheel: () => this.touched(),
          ontouchmove: () => this.touched(),
          onpointerdown: () => this.touched(),
        },
        this.text,
      );
      new ResizeObserver(() => this.toEnd()).observe(this.text); // after the layout that is due anyway: forces none
      this.reset();
    }

    reset() {
      this.text.replaceChildren();
      this.spans = [];
      this.drawnRounds = 0;
      this.line = null;
      this.stuck = true;
      this.generation = this.picture.answer.generation;
    }

    draw() {
      const { answer } = this.picture;
      if (this.generation !== answer.generation) this.reset();
      const fresh = answer.rounds.slice(this.drawnRounds);
      for (const round of fresh) this.append(round);
      this.drawnRounds = answer.rounds.length;
      this.retail();
      this.drawGhosts(answer.waiting());
    }

    /** The viewer's hand is on the ribbon: where it ends up says whether the ribbon follows the answer. */
    touched() {
      this.hand = performance.now();
    }

    scrolled() {
      if (performance.now() - (this.hand || -1e9) < 500) this.stuck = this.atEnd();
    }

    toEnd() {
      if (this.stuck) this.node.scrollTop = this.node.scrollHeight;
    }

    append(round) {
      const { answer } = this.picture;
      const tokens = answer.tokens.slice(round.first, round.first + round.tokens.length);
      const thrown = round.rejected.length + round.ignored.length;
      tokens.forEach((token, place) => {
        if (thrown && place === tokens.length - 1) this.put(this.chip(round, thrown));
        this.spans.push(this.token(token));
      });
      if (thrown && !tokens.length) this.put(this.chip(round, thrown));
    }

    /** A token's span; one that holds a line end is split behind it, so that lines can be blocks. */
    token(token) {
      const cut = token.text.lastIndexOf("\n") + 1;
      const span = this.put(tokenSpan(token, cut ? token.text.slice(0, cut) : token.text));
      if (!cut) return this.broken(token, span);
      this.line = null;
      if (cut < token.text.length) this.put(tokenSpan(token, token.text.slice(cut), true));
      return span;
    }

    /** Lines are blocks, so that a new token costs the layout of one line, not of the whole answer. */
    put(node) {
      if (!this.line) this.text.append((this.line = make("div.dp-line")));
      this.line.append(node);
      return node;
    }

    /** End a block that has grown long where the line wraps anyway: at a token whose space hangs at the line's end. */
    broken(token, span) {
      const length = this.line.childElementCount;
      if (length < 100 || !token.text.startsWith(" ") || (length < 200 && span.getClientRects().length < 2))
        return span;
      span.textContent = " ";
      this.line = null;
      this.put(tokenSpan(token, token.text.slice(1), true));
      return span;
    }

    chip(round, count) {
      return make("span.dp-chip", {
        role: "button",
        tabindex: "-1",
        data: { round: round.index },
        "aria-label": `${plural(count, "drafted token")} thrown away in round ${round.index + 1}`,
      });
    }

    /** Text that came later for the last token. */
    retail() {
      const token = this.picture.answer.tokens[this.spans.length - 1];
      if (!token || token.drawn === token.text) return;
      const span = this.spans[this.spans.length - 1];
      span.textContent += token.text.slice(token.drawn.length);
      token.drawn = token.text;
      mark(span, token.text);
    }

    drawGhosts(chain) {
      const key = chain.map((d) => d.id).join();
      if (this.ghosts.dataset.key !== key) {
        this.ghosts.dataset.key = key;
        this.ghosts.replaceChildren(
          ...chain.map((d) => make("span.dp-ghost", { data: { text: d.text.replace(/\n/g, "↵"), draft: d.id } })),
        );
      }
      if (chain.length && this.ghosts !== this.line?.lastChild) this.put(this.ghosts);
    }

    atEnd() {
      return this.node.scrollTop + this.node.clientHeight >= this.node.scrollHeight - 8;
    }

    point(target) {
      const spot = target.closest?.(".dp-t, .dp-chip, .dp-ghost");
      if (spot === this.pointed) return;
      this.pointed = spot;
      if (spot) this.show(spot);
      else if (!this.node.contains(document.activeElement)) this.picture.tip.hide();
    }

    rest() {
      this.pointed = null;
      if (!this.node.contains(document.activeElement)) this.picture.tip.hide();
    }

    focusin(target) {
      if (target === this.node) return;
      const spot = target.closest(".dp-t, .dp-chip");
      if (spot) this.show(spot);
    }

    click(target) {
      const spot = target.closest(".dp-t, .dp-chip");
      if (!spot) return;
      this.show(spot);
      this.picture.select(this.roundOf(spot));
    }

    roundOf(spot) {
      return spot.dataset.round !== undefined
        ? Number(spot.dataset.round)
        : this.picture.answer.tokens[spot.dataset.i].round;
    }

    show(spot) {
      const { answer, tip } = this.picture;
      const box = spot.getClientRects()[0] || spot.getBoundingClientRect();
      if (spot.classList.contains("dp-chip"))
        tip.show(box, discardedContent(answer, answer.rounds[spot.dataset.round]), spot);
      else if (spot.classList.contains("dp-ghost")) {
        const draft = answer.drafts.get(Number(spot.dataset.draft));
        if (draft)
          tip.show(
            box,
            tipContent([
              `Waiting ${quoted(draft.text)}`,
              "Guessed by the draft, waiting for the target.",
              [
                ["draft’s probability", percent(draft.prob)],
                ["from", origin(draft)],
              ],
            ]),
          );
      } else tip.show(box, tipContent(describeToken(answer, answer.tokens[spot.dataset.i])), spot);
    }

    /** All places that arrows stop at, in order. */
    stops() {
      return [...this.text.querySelectorAll(".dp-t:not(.dp-rest), .dp-chip")];
    }

    key(event) {
      const stops = this.stops();
      const at = stops.indexOf(document.activeElement);
      const moves = {
        ArrowRight: at + 1,
        ArrowLeft: at < 0 ? stops.length - 1 : at - 1,
        Home: 0,
        End: stops.length - 1,
        ArrowDown: this.vertical(stops, at, 1),
        ArrowUp: this.vertical(stops, at, -1),
      };
      if (event.key === "Escape") this.escape(at);
      else if (event.key === "Enter" || event.key === " ") {
        if (at >= 0) this.click(stops[at]);
      } else if (event.key in moves && !event.ctrlKey && !event.metaKey && !event.altKey) {
        this.touched();
        stops[Math.min(Math.max(moves[event.key], 0), stops.length - 1)]?.focus({ preventScroll: false });
      } else return;
      event.preventDefault();
    }

    escape(at) {
      if (this.picture.tip.node.hidden && at >= 0) this.node.focus();
      this.picture.tip.hide();
    }

    /** The stop on the next line (direction 1) or the line before (-1), nearest to this one. */
    vertical(stops, at, direction) {
      if (at < 0) return 0;
      const here = stops[at].getBoundingClientRect();
      let best = at;
      let bestGap = Infinity;
      for (let i = at + direction, line = null; i >= 0 && i < stops.length; i += direction) {
        const box = stops[i].getBoundingClientRect();
        if (Math.abs(box.top - here.top) < 4) continue;
        line = line ?? box.top;
        if (Math.abs(box.top - line) > 4) break;
        if (Math.abs(box.left - here.left) < bestGap) [best, bestGap] = [i, Math.abs(box.left - here.left)];
      }
      return best;
    }

    copy(event) {
      const selection = getSelection();
      if (!selection.rangeCount || selection.isCollapsed) return;
      event.clipboardData.setData("text/plain", selection.getRangeAt(0).cloneContents().textContent);
      event.preventDefault();
    }

    highlight(round) {
      for (const span of this.marked || []) span.classList.remove("dp-selected");
      const chosen = this.picture.answer.rounds[round];
      this.marked = chosen ? this.spans.slice(chosen.first, chosen.first + chosen.tokens.length) : [];
      for (const span of this.marked) span.classList.add("dp-selected");
    }
  }

  function tokenSpan(token, text, rest = false) {
    const span = make(`span.dp-t.dp-${token.kind}${rest ? ".dp-rest" : ""}`, {
      tabindex: rest ? undefined : "-1",
      text,
      data: { i: token.index },
    });
    mark(span, text);
    token.drawn = token.text;
    return span;
  }

  /** Signs for what has no shape: line ends and tokens without text. */
  function mark(span, text) {
    span.classList.toggle("dp-empty", text === "");
    span.classList.toggle("dp-nl", text.includes("\n"));
  }

  Object.assign(window.duochat, { Ribbon });
})();
