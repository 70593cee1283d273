/* The rounds of an answer, explained from their record: what was drafted, what the target chose at each place, and why
   that was an accepted token or a correction; and the exercises that follow from them. */
(() => {
  "use strict";
  const { fixed, quoted, exact, isNumber } = window.duochat;
  const ORDINALS = ["first", "second", "third"];

  const ordinal = (rank) => ORDINALS[rank - 1] || `${rank}th`;
  const quote = (text) => (text ? quoted(text) : "a token without text");
  const tokens = (n) => `${n} token${n === 1 ? "" : "s"}`;

  /** What happened at each place of each round: { index, tested, places, summary }. noise: that of the drafted tokens
   * by id and that of the written ones in order, which both lanes share; null at temperature 0. */
  function explain({ rounds, drafts }, noise) {
    let root = -1; // id of the last token written, -1 if it was not drafted
    return rounds.map((round) => {
      const places = round.tokens.map((token, place) => {
        const before = round.accepted[place - 1] ?? root;
        const here = [...round.accepted, ...round.rejected, ...round.ignored]
          .map((id) => drafts.get(id))
          .filter((d) => d && d.position === round.position + place && d.parent === before);
        return explained(round, token, here, drafts, noise && { ...noise, own: noise.written[round.first + place] });
      });
      root = round.tokens.at(-1)?.[1] === "accepted" ? round.accepted.at(-1) : -1;
      const tested = round.accepted.length + round.rejected.length;
      return { index: round.index, tested, places, summary: summary(round) };
    });
  }

  /** here: the drafted tokens that stood at this place of the path which the target took. */
  function explained(round, [text, kind, prob, id], here, drafts, noise) {
    const taken = kind === "accepted" ? id : -1;
    const bars = here.map((d) => {
      const chosen = d.id === taken;
      const target = chosen && isNumber(prob) ? prob : (d.targetProb ?? null);
      return { text: d.text, draft: d.prob, target, chosen, noise: noise && noise.drafted[d.id] };
    });
    if (!bars.some(({ chosen }) => chosen))
      bars.push({ text, draft: null, target: prob, chosen: true, noise: noise && noise.own });
    bars.sort((a, b) => (b.draft || 0) - (a.draft || 0) || b.chosen - a.chosen);
    return { kind, text, bars, why: why(round, { text, kind, id }, here, drafts) };
  }

  /** Why a token stands where it does. */
  function why(round, { text, kind, id }, here, drafts) {
    const said = `The target chose ${quote(text)}`;
    if (kind === "correction") {
      const rejected = here.filter((d) => round.rejected.includes(d.id)).map((d) => quote(d.text));
      return `${said}; the draft had ${rejected.join(" or ") || "something else"}. The target's token is written, and whatever was drafted below the wrong one is thrown away.`;
    }
    if (kind === "bonus")
      return `The whole branch was accepted, and the forward also gave the token after it: ${quote(text)}.`;
    if (kind === "plain") return `Nothing was tested here, so the forward gave one token: ${quote(text)}.`;
    if (!round.pending.some(([pending]) => pending === id))
      return `${said}. It had no row in this forward, but the draft had prepared this very outcome: what hangs below it stays, and the next forward has something to verify.`;
    const found = drafts.get(id);
    return `${said}, which was ${found ? `the draft's ${ordinal(found.rank)} choice` : "drafted"} here: accepted.`;
  }

  function summary({ pending, accepted, tokens: written, reason }) {
    if (!pending.length)
      return `Nothing to verify in this round${reason ? ` (${reason})` : ""}: one token, as in plain decoding.`;
    const forwards = `${written.length} ${written.length === 1 ? "forward" : "forwards"}`;
    return (
      `${pending.length} drafted ${pending.length === 1 ? "token" : "tokens"} verified in one forward, ${accepted.length} accepted, ` +
      `${tokens(written.length)} written. Plain decoding would have needed ${forwards}.`
    );
  }

  /** Exercises with this answer's numbers. */
  function ownQuestions({ rounds }, { target, draft, budget }) {
    const asked = [
      {
        kind: "number",
        unit: "tokens",
        right: Number(fixed(budget)),
        slack: 0.06 * budget + 0.05,
        ask: `One forward of the target takes ${exact(target)} here, one drafted token ${exact(draft)}. What is the draft budget γ*?`,
        because: "γ* = T_target / T_draft: as many drafted tokens as fit beside one forward.",
      },
    ];
    const shown = rounds.find((r) => r.accepted.length >= 2 && r.tokens.at(-1)?.[1] === "correction");
    if (shown)
      asked.unshift({
        kind: "number",
        unit: "tokens",
        right: shown.tokens.length,
        slack: 0,
        ask: `In round ${shown.index + 1}, ${shown.pending.length} drafted tokens were verified and ${shown.accepted.length} accepted, then the target corrected. How many tokens did the round write?`,
        because: "The accepted ones and the correction: accepted + 1.",
      });
    return asked;
  }

  Object.assign(window.duochat, { explain, ownQuestions });
})();
