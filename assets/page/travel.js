/* Tokens on their way: now and then a guess that was right goes from the draft's lane over the target's into the text. */
(() => {
  "use strict";
  const { make, reduced, ROWS } = window.duochat;

  const EVERY = 500; // ms between two tokens that set out
  const FAST = 300; // tokens/s from which on nobody can follow one
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
      if (answer.state.finish || answer.gauges.now > FAST || performance.now() - this.last < EVERY || reduced()) return;
      const token = answer.tokens.slice(this.seen).findLast(({ kind, text }) => kind === "accepted" && text.trim());
      if (!token) return;
      this.seen = answer.tokens.length;
      this.last = performance.now();
      setTimeout(() => this.send(token));
    }

    /** Where a token that was guessed stands in the two lanes: [x, y] of each, within their canvas. */
    way(token) {
      const { lanes, answer } = this.picture;
      const middle = ([a, b]) => Math.min(Math.max(lanes.x((a + b) / 2), ROWS.gutter + 30), lanes.view.width - 40);
      const { at, batches } = answer.rounds[answer.drafts.get(token.draft).born];
      return [
        [middle(batches.at(-1) || at), ROWS.cpu + ROWS.lane / 2],
        [middle(answer.rounds[token.round].at), ROWS.gpu + ROWS.lane / 2],
      ];
    }

    send(token) {
      const { lanes, origins, answer } = this.picture;
      if (answer.tokens[token.index] !== token) return; // another answer was opened meanwhile
      const [frame, goal] = [lanes.canvas.getBoundingClientRect(), origins.boxOf(token)];
      if (!frame.width || !goal) return;
      const stops = this.way(token).map(([x, y]) => [frame.left + x, frame.top + y]);
      const at = ([x, y], opacity) => ({ transform: `translate(${x}px, ${y}px) translate(-50%, -50%)`, opacity });
      const node = make("span.dc-travel", { "aria-hidden": "true" }, token.text.trim());
      this.layer.append(node);
      const end = [goal.left + goal.width / 2, goal.top + goal.height / 2];
      const steps = [at(stops[0], 0), at(stops[0], 1), at(stops[1], 1), at(end, 0.2)];
      node.animate(steps, { duration: TAKES, easing: "ease-in-out" }).onfinish = () => node.remove();
    }
  }

  Object.assign(window.duochat, { Travel });
})();
