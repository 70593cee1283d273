/* Mends what Gradio 6.31 does to the page: its clock, and its number fields. */
(() => {
  "use strict";

  /* Gradio 6.31 asks for every frame for ever (the clock of a progress display that is gone), which costs a tenth of a
   * core where the processor draws. That clock gets two frames a second. */
  const CLOCK = /^\(\)=>\{\w+\(\w+,\(performance\.now\(\)-/;
  const nextFrame = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (draw) =>
    CLOCK.test(Function.prototype.toString.call(draw))
      ? setTimeout(() => draw(performance.now()), 500)
      : nextFrame(draw);

  // Emptied, a slider's number field would send "nothing", which Gradio answers with a fault: it keeps its number.
  const numbers = new WeakMap();
  const isNumber = (node) => node.matches?.("input[type=number]");
  const guard = (e) => {
    if (!isNumber(e.target)) return;
    if (e.target.value !== "") return void numbers.set(e.target, e.target.value);
    e.stopImmediatePropagation();
    if (e.type !== "input" && numbers.has(e.target)) e.target.value = numbers.get(e.target);
  };
  document.addEventListener("focus", guard, true);
  for (const type of ["input", "change", "blur"]) document.addEventListener(type, guard, true);
})();
