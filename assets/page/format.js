/* How numbers, times and tokens are written. */
(() => {
  "use strict";

  const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
  const fixed = (x, digits = 1) => (isNumber(x) ? x.toFixed(digits) : "–");
  const percent = (x) => (!isNumber(x) ? "–" : x > 0 && x < 0.005 ? "< 1 %" : `${Math.round(100 * x)} %`);
  const seconds = (x) =>
    !isNumber(x) ? "–" : x < 0.1 ? `${fixed(1000 * x, x < 0.01 ? 1 : 0)} ms` : `${fixed(x, 2)} s`;
  /** Milliseconds in four digits: a quotient of two of them is right in all of the digits that are shown of it. */
  const exact = (x) => (isNumber(x) ? `${Number((1000 * x).toPrecision(4))} ms` : "–");
  const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  const capital = (words) => words.charAt(0).toUpperCase() + words.slice(1);
  /** Text made visible in a label: spaces and line ends have signs of their own. */
  const shown = (text) =>
    text === ""
      ? "∅"
      : text
          .replace(/\n/g, "↵")
          .replace(/\t/g, "⇥")
          .replace(/^ +| +$/g, (s) => "␣".repeat(s.length));
  const quoted = (text) => `‘${text === "" ? "(no text)" : text.replace(/\n/g, "↵")}’`;

  /** The name that people read of a decoder; the server tells it in the document's head. */
  const NAMES = JSON.parse(document.querySelector("meta[name=decoders]")?.content || "{}");
  const decoderName = (decoder) => NAMES[decoder] || decoder || "";

  Object.assign(window.duochat, { isNumber, fixed, percent, seconds, exact, plural, capital, shown, quoted, decoderName });
})();
