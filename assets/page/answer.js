/* An answer as the page knows it: frames of the server's `Live` become rounds, tokens and drafts. */
(() => {
  "use strict";

  class Answer {
    constructor() {
      this.reset();
    }

    reset() {
      this.n = 0;
      this.rounds = [];
      this.tokens = [];
      this.text = "";
      this.drafts = new Map();
      this.alive = new Set();
      this.state = {};
      this.gauges = {};
      this.generation = (this.generation || 0) + 1;
    }

    /** Take over a frame. Returns false when frames before it are missing. */
    apply(frame) {
      if (frame.from === 0) this.reset();
      else if (frame.n <= this.n) return true;
      else if (frame.from !== this.n) return false;
      this.n = frame.n;
      Object.assign(this.state, frame.state || {});
      if (frame.gauges) this.gauges = frame.gauges;
      for (const round of frame.rounds || []) this.add(round);
      return true;
    }

    add(r) {
      const index = this.rounds.length;
      const round = {
        ...r,
        index,
        drafted: r.drafted || [],
        batches: r.batches || [],
        pending: r.pending || [],
        accepted: r.accepted || [],
        rejected: r.rejected || [],
        ignored: r.ignored || [],
        first: this.tokens.length,
      };
      for (const [id, parent, position, text, prob, reach, rank, origin] of round.drafted) {
        this.drafts.set(id, { id, parent, position, text, prob, reach, rank, origin, born: index, fate: "waiting" });
        this.alive.add(id);
      }
      round.tree = [...this.alive];
      for (const [id, prob] of round.pending) {
        const draft = this.drafts.get(id);
        if (draft) draft.targetProb = prob;
      }
      for (const fate of ["accepted", "rejected", "ignored"])
        for (const id of round[fate]) this.settle(id, fate, index);
      round.tokens.forEach(([text, kind, prob, id], place) => {
        this.tokens.push({
          text,
          kind,
          prob,
          draft: id,
          round: index,
          place,
          index: this.tokens.length,
          start: this.text.length,
        });
        this.text += text;
      });
      this.rounds.push(round);
      if (round.tail) this.tail(round.tail);
    }

    settle(id, fate, index) {
      const draft = this.drafts.get(id);
      if (draft) Object.assign(draft, { fate, fated: index });
      this.alive.delete(id);
    }

    tail(text) {
      if (!this.tokens.length) return;
      this.tokens[this.tokens.length - 1].text += text;
      this.text += text;
    }

    get start() {
      return this.rounds.length ? this.rounds[0].at[0] : 0;
    }
    get end() {
      return this.rounds.length ? this.rounds[this.rounds.length - 1].at[1] : 0;
    }

    /** The likeliest chain of drafted tokens that wait below the end of the answer. */
    waiting(limit = 8) {
      const last = this.rounds[this.rounds.length - 1];
      if (!last || this.state.finish) return [];
      const chain = [];
      const nodes = [...this.alive].map((id) => this.drafts.get(id));
      let position = (last.position || 0) + last.tokens.length;
      let parent = null;
      while (chain.length < limit) {
        const next = nodes.filter((d) => d.position === position && (parent === null || d.parent === parent));
        if (!next.length) break;
        const best = next.reduce((a, b) => (b.reach > a.reach ? b : a));
        chain.push(best);
        [parent, position] = [best.id, position + 1];
      }
      return chain;
    }

    /** The latest computed draft budget γ*; 0 while none is known. */
    get budget() {
      return this.rounds.findLast((round) => round.budget)?.budget || 0;
    }

    /** Index of the token that holds this place of the text, -1 before the first. */
    tokenAt(place) {
      return lastWhere(this.tokens, (token) => token.start <= place);
    }

    /** Index of the last round that began at or before time t, -1 before the first. */
    roundAt(t) {
      return lastWhere(this.rounds, (round) => round.at[0] <= t);
    }
  }

  /** Index of the last item for which good() holds, given that it holds for all before; -1 when for none. */
  function lastWhere(items, good) {
    let [low, high] = [0, items.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (good(items[middle])) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  Object.assign(window.duochat, { Answer });
})();
