/* Tokens on their way: now and then a guess that was right goes from the draft's lane over the target's into the text. */
(() => {
  "use strict";
  const { make, reduced } = window.duochat;

  const EVERY = 500; // ms between two tokens that set out
  const TAKES = 1100; // ms on the way

  class Travel {
    /** picture: with lanes and origins. layer: over the whole window, takes the tokens. */
    constructor(picture, layer) {
      Object.assign(this, { picture, layer, last: 0 });
    }

    /** Called when the picture is drawn. Places are measured after the frame, when its layout costs nothing more. */
    draw() {
      const { answer } = this.picture;
      if (this.generation !== answer.generation) [this.generation, this.seen] = [answer.generation, 0];
      const token = answer.tokens.slice(this.seen).findLast(({ kind, text }) => kind === "accepted" && text.trim());
      if (!token || answer.state.finish || performance.now() - this.last < EVERY || reduced()) return;
      this.seen = answer.tokens.length;
      this.last = performance.now();
      setTimeout(() => this.send(token));
    }

    send(token) {
      const { lanes, origins } = this.picture;
      const [frame, goal] = [lanes.canvas.getBoundingClientRect(), origins.boxOf(token)];
      if (!frame.width || !goal) return;
      const stops = lanes.way(token).map(([x, y]) => [frame.left + x, frame.top + y]);
      const at = ([x, y], opacity) => ({ transform: `translate(${x}px, ${y}px) translate(-50%, -50%)`, opacity });
      const node = make("span.dc-travel", { "aria-hidden": "true" }, token.text.trim());
      this.layer.append(node);
      const steps = [at(stops[0], 0), at(stops[0], 1), at(stops[1], 1), at([goal.left + goal.width / 2, goal.top + goal.height / 2], 0.2)];
      node.animate(steps, { duration: TAKES, easing: "ease-in-out" }).onfinish = () => node.remove();
    }
  }

  Object.assign(window.duochat, { Travel });
})();
