/* Texts of the page whose contrast against what lies behind them is below 4.5: a list of "text: ratio". */
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (css) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((c, i) => c * a + under[i] * (1 - a));
  const behind = (node) => {
    const layers = [];
    for (let n = node; n; n = n.parentElement) layers.push(rgba(getComputedStyle(n).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const light = (c) => {
    const [r, g, b] = c.map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const poor = new Set();
  for (const root of document.querySelectorAll(".dc-side, .dc-chat, .dc-head")) {
    const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let t; (t = walk.nextNode()); ) {
      const node = t.parentElement;
      const shown = node.getClientRects().length && t.data.trim() && !node.closest(".dc-hidden, .katex, :disabled");
      if (!shown || !node.checkVisibility({ opacityProperty: true })) continue;
      const ground = behind(node), ink = over(rgba(getComputedStyle(node).color), ground);
      const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
      const ratio = (a + 0.05) / (b + 0.05);
      if (ratio < 4.5) poor.add(`${t.data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
    }
  }
  return [...poor];
}
