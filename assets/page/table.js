/* The rounds of an answer as a table: the same data as the lanes. */
(() => {
  "use strict";
  const { make, fixed, seconds } = window.duochat;

  const COLUMNS = [
    "round",
    "step from",
    "to",
    "draft at work",
    "drafted",
    "γ*",
    "verified",
    "accepted",
    "rejected",
    "untested",
    "written",
  ];

  function roundsTable(rounds) {
    const row = (r) => [
      r.index + 1,
      seconds(r.at[0]),
      seconds(r.at[1]),
      seconds(r.batches.reduce((sum, [a, b]) => sum + b - a, 0)),
      r.drafted.length,
      fixed(r.budget),
      r.pending.length,
      r.accepted.length,
      r.rejected.length,
      r.ignored.length,
      r.tokens.length,
    ];
    return make(
      "table",
      {},
      make("caption", {
        text: `Rounds ${rounds.length ? rounds[0].index + 1 : 0} to ${rounds.length ? rounds[rounds.length - 1].index + 1 : 0}`,
      }),
      make("thead", {}, make("tr", {}, ...COLUMNS.map((c) => make("th", { scope: "col", text: c })))),
      make("tbody", {}, ...rounds.map((r) => make("tr", {}, ...row(r).map((v) => make("td", { text: `${v}` }))))),
    );
  }

  Object.assign(window.duochat, { roundsTable });
})();
