/* The whole answer in a strip: the share of each column in which a lane ran, and the window that the lanes show. */
(() => {
  "use strict";

  /** width, left: pixels of the strip; from, to: seconds that the lanes' window shows, whole: those of the strip. */
  function drawOverview(pen, { answer, ink }, { width, left: gutter, from, to, whole: [start, end] }) {
    pen.clearRect(0, 0, width, 30);
    pen.fillStyle = ink.track;
    pen.fillRect(gutter, 2, width - gutter, 12);
    pen.fillRect(gutter, 16, width - gutter, 12);
    pen.fillStyle = ink.soft;
    pen.font = `10px ${ink.font}`;
    pen.textAlign = "left";
    pen.fillText("whole", 0, 15);
    if (!answer.rounds.length) return;
    const columns = Math.max(1, Math.floor((width - gutter) / 2));
    const length = Math.max(end - start, 1e-6);
    const busy = busyShares(answer, start, length, columns);
    for (const [lane, y, colour] of [
      [busy.cpu, 14, ink.cpu],
      [busy.gpu, 28, ink.gpu],
    ]) {
      pen.fillStyle = colour;
      lane.forEach((share, i) => {
        if (share > 0.01) pen.fillRect(gutter + 2 * i, y - 12 * share, 2, 12 * share);
      });
    }
    const x = (t) => gutter + ((t - start) / length) * (width - gutter);
    pen.strokeStyle = ink.text;
    pen.lineWidth = 1.5;
    const left = Math.max(gutter, x(from));
    pen.strokeRect(left, 1, Math.max(3, Math.min(width - 1, x(to)) - left), 28);
    pen.lineWidth = 1;
  }

  function busyShares(answer, start, length, columns) {
    const busy = { cpu: new Float32Array(columns), gpu: new Float32Array(columns) };
    const width = length / columns;
    const spread = (lane, a, b) => {
      const last = Math.min(columns - 1, Math.floor((b - start) / width));
      for (let i = Math.max(0, Math.floor((a - start) / width)); i <= last; i++) {
        const [left, right] = [start + i * width, start + (i + 1) * width];
        lane[i] = Math.min(1, lane[i] + Math.max(0, Math.min(b, right) - Math.max(a, left)) / width);
      }
    };
    for (const round of answer.rounds) {
      spread(busy.gpu, round.at[0], round.at[1]);
      for (const [a, b] of round.batches) spread(busy.cpu, a, b);
    }
    return busy;
  }

  Object.assign(window.duochat, { drawOverview });
})();
