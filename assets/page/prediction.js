/* Predicted speedup of each schedule over plain decoding, from c, α, γ, k and the share of prefetched outcomes.

   All times are in target steps: one target forward of width 1 takes 1, one drafted token takes c. Each drafted token
   is taken to be accepted with probability α, whatever came before it; lesson.yaml states the formulas.

   A case: { c: T_draft / T_target, alpha, gamma: drafted tokens a round, k: sequences, hits: share of outcomes
   prefetched, widen: share of a target step that each verified token adds, rest: time of a round in which the target
   rested, where it was measured, waited: the part of it in which it waited for a draft }. */
(() => {
  "use strict";
  const SECOND_CHOICE = 0.5; // share of the draft's misses that each further sequence catches
  const FURTHEST = 40; // budgets that curves go to
  const SCHEDULE_OF = { speculative: "sequential", duodecoding: "chain", duotree: "prefetch" }; // by decoder
  const FAR = 0.15; // a prediction that misses by more is explained
  const RANGES = {
    c: [0.005, 2, 0.125],
    alpha: [0, 0.99, 0.7],
    gamma: [1, FURTHEST, 8],
    k: [1, 8, 1],
    hits: [0, 1, 0.8],
    widen: [0, 0.5, 0],
  };

  /** Expected tokens of a forward that tests a chain: 1 + α + α² + … + α^tested. */
  const emitted = (alpha, tested) => (alpha >= 1 ? tested + 1 : (1 - alpha ** (tested + 1)) / (1 - alpha));

  /** How long γ drafted tokens take beyond the forward beside them. */
  const behind = ({ gamma, c }, forward) => Math.max(0, gamma * c - forward);

  /** What a schedule makes of a round: tokens written, its time with the target at work and at rest, the speedup. */
  const outcome = (tokens, forward, rest) => ({ tokens, forward, rest, rate: tokens / (forward + rest) });

  const SCHEDULES = {
    /** Draft γ tokens, then verify them (arXiv 2211.17192). */
    sequential: ({ alpha, gamma, c, widen, rest = gamma * c }) =>
      outcome(emitted(alpha, gamma), 1 + gamma * widen, rest),

    /** The paper's: k sequences of γ/k tokens beside each forward, one pending chain, nothing after a miss. */
    chain(of) {
      const length = Math.max(1, of.gamma / of.k);
      const start = 1 - (1 - of.alpha) * SECOND_CHOICE ** (of.k - 1);
      const full = start / (1 + start - start * of.alpha ** (length - 1));
      const forward = 1 + full * (length - 1) * of.widen;
      return outcome(full * emitted(of.alpha, length - 1) + (1 - full), forward, of.rest ?? behind(of, forward));
    },

    /** Drafts also wait below the likely rejections; after a miss the target rests for γ new ones, or for as many as a
     * measured rest leaves time for. */
    prefetch(of) {
      const forward = 1 + of.gamma * of.widen;
      const [late, wait] = [behind(of, forward), (1 - of.hits) * of.gamma * of.c];
      const { rest = late + wait, waited = rest } = of;
      const fresh = wait ? of.gamma * Math.min(1, Math.max(0, waited - late) / wait) : of.gamma;
      const tokens = of.hits * emitted(of.alpha, of.gamma) + (1 - of.hits) * emitted(of.alpha, fresh);
      return outcome(tokens, forward, rest);
    },
  };

  const each = (make) => Object.fromEntries(Object.entries(SCHEDULES).map(([name, of]) => [name, make(of, name)]));

  /** Speedups at this γ, each schedule's best [γ, speedup], curves over γ, and γ* = 1/c. values: of a case, held to
   * sane ranges. own: the schedule whose rest was measured; the others wait as their formulas say. */
  function whatIf({ rest, waited, ...values }, own) {
    const held = ([low, high, usual], value) => Math.min(high, Math.max(low, value ?? usual));
    const of = Object.fromEntries(Object.entries(RANGES).map(([name, range]) => [name, held(range, values[name])]));
    const gammas = Array.from({ length: FURTHEST }, (_, i) => i + 1);
    const curves = each((schedule) => gammas.map((gamma) => schedule({ ...of, gamma }).rate));
    const best = each((_, name) => [1 + curves[name].indexOf(Math.max(...curves[name])), Math.max(...curves[name])]);
    const now = each((schedule, name) => schedule(name === own ? { ...of, rest, waited } : of).rate);
    return { case: of, budget: 1 / of.c, now: { plain: 1, ...now }, best, gammas, curves };
  }

  /** What the formula of its schedule says of an answer, from its own acceptance, hits and waits; null where nothing
   * was drafted. gap: what explains a miss of more than FAR, "" where there is none. */
  function predicted({ rounds, state }, { costs, measured, shared }) {
    const schedule = SCHEDULE_OF[state.decoder];
    if (!schedule || measured.alpha === null) return null;
    const seen = seenRound(rounds, costs.plain);
    const { rest, waited } = seen;
    const { alpha, gamma, hits } = measured;
    const own = { c: costs.c, alpha, gamma: Math.round(gamma), k: 1, hits: hits || 0, widen: costs.widen, rest, waited };
    const told = SCHEDULES[schedule](own);
    const far = Math.abs((measured.speedup || told.rate) / told.rate - 1) > FAR;
    return { schedule, case: own, rate: told.rate, gap: far ? gap(told, measured.tau, seen.forward, costs, shared) : "" };
  }

  /** Time of a round in which the target worked, rested and, of that, waited for a draft: mean after the first, in
   * plain forwards. */
  function seenRound(rounds, plain) {
    const mean = (time) => rounds.slice(1).reduce((sum, r, i) => sum + time(r, rounds[i]), 0) / (rounds.length - 1) / plain;
    const forward = mean(({ at }) => at[1] - at[0]);
    const rest = mean(({ at }, before) => Math.max(0, at[0] - before.at[1]));
    return { forward, rest, waited: Math.min(rest, mean(({ waited = 0 }) => waited)) };
  }

  /** The parts of a round in which a prediction misses, in words. */
  function gap(told, tau, forward, { plain }, shared) {
    const parts = [];
    const ms = (steps) => `${Number((1000 * steps * plain).toPrecision(3))} ms`;
    const why = shared ? " (draft and target share one processor)" : "";
    if (Math.abs(forward / told.forward - 1) > FAR / 2)
      parts.push(`a step of the target took ${ms(forward)} and not ${ms(told.forward)} as measured alone${why}`);
    if (Math.abs(tau / told.tokens - 1) > FAR / 2)
      parts.push(
        `a step wrote ${tau.toFixed(2)} tokens where the formula expects ${told.tokens.toFixed(2)} (it takes every guess ` +
          "to be right with the same chance; real text comes in easy and hard stretches)",
      );
    return parts.length ? `What explains the gap: ${parts.join(", and ")}.` : "";
  }

  Object.assign(window.duochat, { SCHEDULES, whatIf, predicted });
})();
