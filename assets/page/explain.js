/* What is said of tokens, rounds and drafts: every sentence of the picture, and nothing that draws. */
(() => {
  "use strict";
  const { fixed, percent, seconds, plural, quoted, isNumber, capital } = window.duochat;

  const KINDS = {
    accepted: "Accepted",
    correction: "Correction",
    bonus: "Bonus",
    plain: "Plain",
    rejected: "Rejected",
    ignored: "Left untested",
    waiting: "Waiting",
  };

  const origin = (draft) => (draft.origin === "ngram" ? "copied from the text so far (n-gram)" : "the draft model");

  /* ---- the answer as a whole ---- */

  const WARM = 16; // steps before a speedup is told
  const EVEN = 0.03; // a speedup so near to 1 is none

  /** The answer in one sentence, as clauses [number, term, words, key]; [] before the first token. key: of the figure,
   * or "ties", that says what the term means. */
  function summary({ gauges: g, state }, exact) {
    if (!g.tokens) return [];
    if (state.decoder === "autoregressive")
      return [[fixed(g.rate), "tokens a second", " by the large model alone, one per step", "speed"]];
    const text = { true: ["", "", "the same text"], false: ["", "the same text up to near ties", "", "ties"] }[exact];
    return [[fixed(g.tau), "tokens per step", " of the large model", "tau"], ...gain(g), ...(text ? [text] : [])];
  }

  function gain(g) {
    if (!isNumber(g.speedup)) return [];
    const even = Math.abs(g.speedup - 1) < EVEN;
    if (even || g.speedup > 1)
      return [[even ? "" : `${fixed(g.speedup)} times`, "as fast", " as without the draft", "speedup"]];
    return [[`${fixed(g.speedup, 2)} times`, "the speed", ` without the draft (slower: ${cause(g)})`, "speedup"]];
  }

  function cause(g) {
    if (isNumber(g.alpha) && g.alpha < 0.5) return "most guesses are wrong";
    return g.tau < 1.2 ? "too little is guessed in time" : "checking costs more than it gains";
  }

  /** What stands beside the speedup. */
  function speedupNote(g, decoder) {
    if (decoder === "autoregressive") return "This is plain decoding itself.";
    if (!isNumber(g.speedup)) return `Told after ${WARM} steps: the first ones warm up and wait for the draft.`;
    return (
      `Since the first ${WARM} steps ${fixed(g.compared_rate)} tokens/s; plain decoding would write ${fixed(g.plain_rate)} there, ` +
      "by the times of this answer’s own steps without what guessing delays them by."
    );
  }

  /** Why the draft is not at work all the time, from what the rounds tell. */
  function rest({ rounds, state }) {
    const paused = rounds.filter((round) => round.speculation === "paused").length;
    let [busy, beside] = [0, 0];
    for (const { at, batches } of rounds)
      for (const [a, b] of batches) {
        busy += b - a;
        beside += Math.max(0, Math.min(b, at[1]) - Math.max(a, at[0]));
      }
    const turns = state.decoder === "speculative" || (busy && beside < 0.1 * busy);
    return (
      (paused ? ` Guessing was paused in ${paused} of ${plural(rounds.length, "step")}: it did not pay.` : "") +
      (turns ? " The lanes take turns here: the draft rests while the target checks." : "")
    );
  }

  /** Why a step had no guesses, as a sentence's part; "" where guessing was on. */
  const why = (round) =>
    round.speculation === "paused"
      ? `guessing was paused here: it did not pay${round.reason ? ` (${round.reason})` : ""}`
      : reason(round);

  /** Why nothing is drafted, in words; "" when speculation is on. */
  const reason = ({ speculation = "on", reason = "" }) =>
    speculation === "on" ? "" : reason || "plain decoding drafts nothing";

  const BEFORE = {
    queued: "Waiting for the engine",
    loading: "Loading the models",
    prefill: "Reading the prompt",
    decode: "Reading the prompt",
    done: "No answer",
  };

  /** [state, text] of the badge. */
  function badge({ state, rounds }) {
    const { speculation = "", phase, decoder, error, finish } = state;
    if (error) return ["error", `Stopped: ${error}`];
    if (!rounds.length) return ["idle", BEFORE[phase] || "Waiting for a message"];
    if (speculation === "warming") return ["warming", `Guessing starts soon: ${reason(state)}`];
    if (speculation === "paused") return ["off", `Guessing paused: ${reason(state)}`];
    if (speculation === "off") return ["off", `The large model alone: ${reason(state)}`];
    const turns = decoder === "speculative";
    if (finish) return ["on", turns ? "Guessed, then checked, in turns" : "Guessed and checked at the same time"];
    return ["on", turns ? "Guessing, then checking, in turns" : "Guessing and checking at the same time"];
  }

  /** How an answer ended, in words. */
  const ended = (finish) =>
    ({ length: "ended at its longest length", cancelled: "stopped", error: "ended by a fault" })[finish] || "finished";

  /* ---- tokens ---- */

  /** [heading, sentence, facts] of an emitted token. */
  function describeToken(answer, token) {
    const round = answer.rounds[token.round];
    const draft = answer.drafts.get(token.draft);
    const facts = [];
    if (draft && token.kind === "accepted")
      facts.push(["draft’s probability", percent(draft.prob)], ["from", origin(draft)]);
    if (isNumber(token.prob)) facts.push(["target’s probability", percent(token.prob)]);
    const others = candidates(answer, token);
    if (others.length) facts.push([token.kind === "accepted" ? "also guessed" : "guessed instead", others.join(", ")]);
    facts.push(["round", `${token.round + 1}`], ["place", `${token.place + 1} of ${round.tokens.length} in its round`]);
    return [`${KINDS[token.kind]} ${quoted(token.text)}`, sentence(token, draft, round), facts];
  }

  /** What else the draft had at the place of a token, likeliest first. */
  function candidates(answer, token) {
    const round = answer.rounds[token.round];
    return [...round.rejected, ...round.ignored]
      .map((id) => answer.drafts.get(id))
      .filter((d) => d && d.position === round.position + token.place)
      .sort((a, b) => b.prob - a.prob)
      .slice(0, 3)
      .map((d) => `${quoted(d.text)} ${percent(d.prob)}`);
  }

  function sentence(token, draft, round) {
    if (token.kind === "accepted")
      return round.pending.some(([id]) => id === token.draft)
        ? "The draft guessed it, and the target chose the same token."
        : "The target chose it, and the draft had already prepared for this outcome: nothing is lost.";
    if (token.kind === "correction")
      return draft
        ? `The target put ${quoted(token.text)} where the draft had ${quoted(draft.text)}.`
        : "The target chose a token that the draft had not guessed.";
    if (token.kind === "bonus") return "Every guess before it was right; the target’s step gives one token more.";
    return `The target alone: ${why(round) || "nothing was guessed yet"}.`;
  }

  /* ---- rounds and the tree ---- */

  function describeRound(round) {
    const facts = [
      ["verified", `${round.pending.length} in ${seconds(round.at[1] - round.at[0])}`],
      ["accepted", `${round.accepted.length}`],
      ["rejected", `${round.rejected.length}`],
      ["left untested", `${round.ignored.length}`],
      ["tokens written", `${round.tokens.length}`],
      ["drafted", `${round.drafted.length} in ${plural(round.batches.length, "batch").replace("batchs", "batches")}`],
    ];
    if (round.budget) facts.push(["budget γ*", fixed(round.budget)]);
    if (round.waited) facts.push(["waited for a draft", seconds(round.waited)]);
    if (round.hit !== undefined && round.hit !== null) facts.push(["outcome was prefetched", round.hit ? "yes" : "no"]);
    return [`Round ${round.index + 1}`, capital(why(round)), facts];
  }

  /** What a verification brought, as wide as there is room for. */
  function verdict(round, room) {
    const sign = { correction: " ▲", bonus: " ✚" }[round.tokens[round.tokens.length - 1]?.[1]] || "";
    const brief = `+${round.tokens.length}`;
    if (room > 150 && round.pending.length)
      return `${round.pending.length} verified, +${round.tokens.length} token${round.tokens.length === 1 ? "" : "s"}${sign}`;
    return room > 44 ? brief + sign : brief;
  }

  function describeNode(n) {
    if (n.root) return [`So far … ${quoted(n.text)}`, "The last token of the answer before this round.", []];
    if (n.target)
      return [
        `${KINDS[n.state]} ${quoted(n.text)}`,
        n.state === "bonus" ? "Everything tested was accepted: one more from the target." : "The target’s own token.",
        [["target’s probability", percent(n.prob)]],
      ];
    const words = {
      accepted: n.pending
        ? "Tested, and the target chose the same."
        : "Not tested, but the target arrived here: prefetched outcome.",
      rejected: "Tested: the target chose another token here.",
      ignored: "Never reached: an earlier token was rejected, or another branch won.",
      waiting: n.pending ? "Tested, and kept." : "Drafted beside this step; waits for the next round.",
    }[n.state];
    const facts = [
      ["draft’s probability", percent(n.draft.prob)],
      ["expected to be reached", percent(n.draft.reach)],
      ["choice", `${n.draft.rank}.`],
      ["from", origin(n.draft)],
      ["drafted in round", `${n.draft.born + 1}`],
    ];
    if (n.pending && isNumber(n.draft.targetProb))
      facts.splice(1, 0, ["target’s probability", percent(n.draft.targetProb)]);
    return [`${KINDS[n.state]} ${quoted(n.draft.text)}`, words, facts];
  }

  /** A round of the tree in words. */
  function treeWords(answer, index) {
    const round = answer.rounds[index];
    const [text, kind] = round.tokens[round.tokens.length - 1] || [];
    if (text === undefined) return "The answer was stopped: this round wrote nothing.";
    if (!round.pending.length && !round.accepted.length)
      return `Nothing was verified: ${why(round) || "no guess was ready"}. The target gave ${quoted(text)}.`;
    const kept = round.tree.filter(
      (id) => answer.drafts.get(id).fate === "waiting" || answer.drafts.get(id).fated > index,
    );
    const end = {
      correction: `then the target put ${quoted(text)} instead`,
      bonus: `and the target added ${quoted(text)}`,
      accepted: "and the outcome was waiting in the tree",
    }[kind];
    const first = `${round.pending.length} verified, ${round.accepted.length} accepted${end ? `, ${end}` : ""}.`;
    return `${first} ${plural(kept.length, "guess").replace("guesss", "guesses")} for the next round${round.hit ? " (prefetched for this outcome)" : ""}.`;
  }

  Object.assign(window.duochat, {
    KINDS,
    ended,
    origin,
    rest,
    summary,
    badge,
    describeToken,
    describeRound,
    describeNode,
    treeWords,
    verdict,
    speedupNote,
  });
})();
