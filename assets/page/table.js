/* Tables, and the rounds of an answer as one: the same data as the lanes. */
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

  /** heads: of the columns, "" for none. rows: of cells, each words, a node or several; the first one heads the row. */
  function table(heads, rows, kind = "") {
    const row = ([first, ...cells]) =>
      make("tr", {}, make("th", { scope: "row" }, ...[first].flat()), ...cells.map((c) => make("td", {}, ...[c].flat())));
    const head = (words) => (words ? make("th", { scope: "col" }, words) : make("td"));
    return make(
      `table${kind}`,
      {},
      make("thead", {}, make("tr", {}, ...heads.map(head))),
      make("tbody", {}, ...rows.map(row)),
    );
  }

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
    const made = table(COLUMNS, rounds.map(row));
    const [first, last] = [rounds[0], rounds.at(-1)].map((r) => (r ? r.index + 1 : 0));
    made.prepend(make("caption", {}, `Rounds ${first} to ${last}`));
    return made;
  }

  Object.assign(window.duochat, { table, roundsTable });
})();
