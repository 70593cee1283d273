/* Where each token of the answer came from, shown in the answer itself: CSS highlights over ranges of the rendered text,
 * never an element a token, so lists, tables and code stay whole. Pointer and keyboard link a token with the picture. */
(() => {
  "use strict";
  const { say, remember, recall, tipContent, describeToken } = window.duochat;

  const TINTED = ["accepted", "correction", "bonus"];
  const UNSAID = ".math, .dc-code-head, summary"; // typeset or added by the page: not words of the raw text
  const FAR = 2000; // characters of markup between two pieces of text, at most: a long address, a formula
  const NEAR = 8; // characters that an escape or an entity takes in the raw text
  const DWELL = 150; // ms that the pointer rests on a token before its card shows

  /** The rendered words of a block in the raw text from index `from` on: pieces {node, offset, raw, length}, and the end.
   * A text node mostly stands in the raw text as it is; where an escape or an entity breaks it, character by character. */
  function align(block, raw, from) {
    const pieces = [];
    let at = from;
    for (const node of words(block)) {
      const found = raw.slice(at, at + FAR + node.data.length).indexOf(node.data);
      if (found < 0) at = scatter(node, raw, at, pieces);
      else {
        pieces.push({ node, offset: 0, raw: at + found, length: node.data.length });
        at += found + node.data.length;
      }
    }
    return { pieces, end: at };
  }

  function scatter(node, raw, from, pieces) {
    let at = from;
    for (let i = 0; i < node.data.length; i++) {
      const found = raw.slice(at, at + NEAR).indexOf(node.data[i]);
      if (found < 0) continue;
      pieces.push({ node, offset: i, raw: at + found, length: 1 });
      at += found + 1;
    }
    return at;
  }

  function* words(block) {
    const walk = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    for (let node; (node = walk.nextNode());) if (node.data.trim() && !node.parentElement.closest(UNSAID)) yield node;
  }

  class Origins {
    /** picture: whose tokens they are. tip: shows a token's card. body(): the element with the blocks of the rendered
     * answer, null when it is not on screen. before(): the answer's text before the picture's first token. */
    constructor(picture, tip, body, before) {
      Object.assign(this, { picture, tip, body, before, blocks: [], at: -1 });
      this.on = recall("origins") !== "off";
      this.tints = Object.fromEntries([...TINTED, "round", "cursor"].map((kind) => [kind, new Highlight()]));
      for (const [kind, tint] of Object.entries(this.tints)) CSS.highlights.set(`dc-${kind}`, tint);
      this.tints.round.priority = 1;
      this.tints.cursor.priority = 2;
      this.sight = new IntersectionObserver((changes) => changes.forEach((change) => this.look(change)));
    }

    /** Only what is in sight is tinted: with every range more, browsers draw the whole text more slowly. */
    look({ target, isIntersecting }) {
      target.seen = isIntersecting;
      const known = this.blocks.find(({ block }) => block === target);
      if (known) this.colour(known);
    }

    /** Show or hide the tint; the browser remembers it. */
    turn(on) {
      this.on = on;
      remember("origins", on ? "" : "off");
      this.reset(this.root);
      this.picture.wake();
    }

    reset(root) {
      for (const tint of Object.values(this.tints)) tint.clear();
      this.sight.disconnect();
      this.blocks = [];
      this.at = -1;
      this.generation = this.picture.answer.generation;
      if (root === this.root) return;
      this.hands?.abort();
      this.root = root;
      if (root) this.listen(root);
    }

    /** Bring the tints up to date with the rendered text and the tokens. */
    draw() {
      const root = this.body();
      if (root !== this.root || this.generation !== this.picture.answer.generation) this.reset(root);
      if (!root || !this.on) return;
      this.head = this.before();
      const raw = this.head + this.picture.answer.text;
      let from = 0;
      for (const [i, block] of [...root.children].entries()) {
        const known = this.blocks[i];
        if (!known || known.source !== block.source || known.from !== from || known.end >= known.seen)
          this.tint(i, block, raw, from);
        from = this.blocks[i].end;
      }
      for (const gone of this.blocks.splice(root.children.length)) this.wipe(gone);
      this.light();
    }

    /** The whole tint while the answer is written and while a hand is on it or on its picture; else it only underlines. */
    light() {
      const near = [this.root, this.picture.root].some((node) => node?.matches(":hover, :focus-within"));
      this.root?.classList.toggle("lit", near || Boolean(this.root.closest(".live")));
    }

    tint(i, block, raw, from) {
      if (this.blocks[i]) this.wipe(this.blocks[i]);
      if (this.blocks[i]?.block !== block) this.sight.observe(block);
      const { pieces, end } = align(block, raw, from);
      this.blocks[i] = { block, source: block.source, from, end, pieces, ranges: [], seen: raw.length };
      this.colour(this.blocks[i]);
    }

    colour(known) {
      this.wipe(known);
      known.ranges = known.block.seen ? known.pieces.flatMap((piece) => this.rangesOf(piece)) : [];
      for (const [kind, range] of known.ranges) this.tints[kind].add(range);
    }

    wipe({ ranges }) {
      for (const [kind, range] of ranges) this.tints[kind].delete(range);
    }

    /** [kind, range] for each run of tokens of one kind within a piece. */
    rangesOf(piece) {
      const { answer } = this.picture;
      const [made, head, end] = [[], this.head.length, piece.raw + piece.length];
      let at = Math.max(piece.raw, head);
      for (let i = answer.tokenAt(at - head); i >= 0 && i < answer.tokens.length && at < end;) {
        const { kind } = answer.tokens[i];
        let stop = at;
        for (; answer.tokens[i]?.kind === kind && stop < end; i++)
          stop = head + answer.tokens[i].start + answer.tokens[i].text.length;
        stop = Math.min(stop, end);
        if (TINTED.includes(kind) && stop > at) made.push([kind, range(piece, at, stop)]);
        at = stop;
      }
      return made;
    }

    /** The ranges in which a stretch of the raw text is on screen. */
    *shown(from, to) {
      for (const { pieces, from: first, end } of this.blocks) {
        if (end < from || first >= to) continue;
        for (const piece of pieces) {
          const [a, b] = [Math.max(from, piece.raw), Math.min(to, piece.raw + piece.length)];
          if (a < b) yield range(piece, a, b);
        }
      }
    }

    rangesOfToken({ start, text }) {
      return [...this.shown(this.head.length + start, this.head.length + start + text.length)];
    }

    /** The box of a token that is in sight, null for others. */
    boxOf(token) {
      const [first] = this.on && this.root ? this.rangesOfToken(token) : [];
      const box = first && live(first).getBoundingClientRect();
      const room = this.root?.closest(".dc-thread")?.getBoundingClientRect();
      return box?.width && room && box.top > room.top && box.bottom < room.bottom ? box : null;
    }

    /** Mark the tokens of a round; -1 marks none. */
    mark(round) {
      this.tints.round.clear();
      const { rounds, tokens } = this.picture.answer;
      const mine =
        rounds[round] && tokens.slice(rounds[round].first, rounds[round].first + rounds[round].tokens.length);
      if (this.on)
        for (const token of mine || []) for (const range of this.rangesOfToken(token)) this.tints.round.add(range);
    }

    /* ---- pointer ---- */

    listen(root) {
      const { signal } = (this.hands = new AbortController());
      for (const type of ["pointerenter", "pointerleave", "focusin", "focusout"])
        for (const node of [root, this.picture.root]) node.addEventListener(type, () => this.light(), { signal });
      root.tabIndex = 0;
      root.setAttribute("role", "group");
      root.setAttribute("aria-label", "The answer. Arrow keys go from token to token and tell where each came from.");
      root.addEventListener("pointermove", (e) => e.pointerType === "mouse" && !e.buttons && this.point(e), { signal });
      root.addEventListener("pointerleave", () => this.leave(), { signal });
      root.addEventListener("click", (e) => this.click(e), { signal });
      root.addEventListener("keydown", (e) => e.target === root && this.key(e), { signal });
      root.addEventListener("blur", () => this.leave(), { signal });
      signal.addEventListener("abort", () =>
        ["tabindex", "role", "aria-label"].forEach((name) => root.removeAttribute(name)),
      );
    }

    point({ clientX, clientY }) {
      clearTimeout(this.dwell);
      this.dwell = setTimeout(() => {
        const token = this.on && this.tokenUnder(clientX, clientY);
        if (token) this.show(token);
        else this.leave();
      }, DWELL);
    }

    tokenUnder(x, y) {
      const spot = document.caretPositionFromPoint?.(x, y) || document.caretRangeFromPoint?.(x, y);
      const [node, offset] = [spot?.offsetNode || spot?.startContainer, spot?.offset ?? spot?.startOffset];
      const known = node && this.blocks.find(({ block }) => block.contains(node));
      for (const piece of known ? known.pieces : []) {
        if (piece.node !== node) continue;
        for (const place of [offset - 1, offset]) {
          const at = piece.raw + place - piece.offset;
          if (at < piece.raw || at >= piece.raw + piece.length || !within(live(range(piece, at, at + 1)), x, y))
            continue;
          return this.picture.answer.tokens[this.picture.answer.tokenAt(at - this.head.length)];
        }
      }
      return null;
    }

    show(token) {
      const ranges = this.rangesOfToken(token);
      this.tints.cursor.clear();
      for (const range of ranges) this.tints.cursor.add(range);
      this.at = token.index;
      this.picture.glance(token.round);
      if (ranges.length)
        this.tip.show(live(ranges[0]).getBoundingClientRect(), tipContent(describeToken(this.picture.answer, token)));
    }

    leave() {
      clearTimeout(this.dwell);
      if (this.at < 0) return;
      this.at = -1;
      this.tints.cursor.clear();
      this.tip.hide();
      this.picture.glance(-1);
    }

    click(event) {
      if (!this.on || !getSelection().isCollapsed || event.target.closest("a, button, summary")) return;
      const token = this.tokenUnder(event.clientX, event.clientY);
      if (token) this.picture.select(token.round);
    }

    /* ---- keyboard ---- */

    key(event) {
      const { tokens } = this.picture.answer;
      const moves = {
        ArrowRight: [this.at + 1, 1],
        ArrowLeft: [this.at < 0 ? tokens.length - 1 : this.at - 1, -1],
        Home: [0, 1],
        End: [tokens.length - 1, -1],
      };
      if (!this.on || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
      if (event.key === "Escape" && this.at >= 0) {
        event.stopPropagation();
        this.leave();
      } else if (event.key === "Enter" && this.at >= 0) this.picture.select(tokens[this.at].round);
      else if (event.key in moves) this.step(...moves[event.key]);
      else return;
      event.preventDefault();
    }

    /** To the nearest token from `index` on that has words on screen. */
    step(index, by) {
      const { answer } = this.picture;
      let token = answer.tokens[index];
      while (token && !this.rangesOfToken(token).length) token = answer.tokens[token.index + by];
      if (!token) return;
      this.rangesOfToken(token)[0].startContainer.parentElement.scrollIntoView({ block: "nearest" });
      this.show(token);
      say(describeToken(answer, token).slice(0, 2).join(". "));
    }
  }

  const range = ({ node, offset, raw }, from, to) =>
    new StaticRange({
      startContainer: node,
      startOffset: offset + from - raw,
      endContainer: node,
      endOffset: offset + to - raw,
    });

  /** A range that can be measured. */
  function live({ startContainer, startOffset, endContainer, endOffset }) {
    const made = document.createRange();
    made.setStart(startContainer, startOffset);
    made.setEnd(endContainer, endOffset);
    return made;
  }

  const within = (range, x, y) =>
    [...range.getClientRects()].some(
      (box) => x >= box.left - 1 && x <= box.right + 1 && y >= box.top - 4 && y <= box.bottom + 4,
    );

  Object.assign(window.duochat, { Origins });
})();
