/* The draft tree of a round, drawn in SVG. */
(() => {
  "use strict";
  const { make, shown, percent, isNumber, describeNode, treeWords, tipContent } = window.duochat;

  const CELL = { width: 96, height: 38, box: 80, tall: 23, pad: 8 };

  /** What the tree of a round shows: nodes with column, row and state; the root is {id: -1, column: 0}.
   * asking: only what the target verifies, in an order that does not tell what it took. */
  function layoutTree(answer, index, { limit = 60, asking = false } = {}) {
    const round = answer.rounds[index];
    const pending = new Set(round.pending.map(([id]) => id));
    const rank = (d) => (asking ? 0 : round.accepted.includes(d.id) ? 2 : pending.has(d.id) ? 1 : 0) + d.reach;
    const drafts = round.tree
      .filter((id) => !asking || pending.has(id))
      .map((id) => answer.drafts.get(id))
      .sort((a, b) => rank(b) - rank(a))
      .slice(0, limit);
    const nodes = new Map(
      drafts.map((d) => {
        const state = asking ? "waiting" : stateIn(d, round);
        return [d.id, { draft: d, state, pending: pending.has(d.id), children: [] }];
      }),
    );
    const before = answer.tokens[round.first - 1];
    const root = { root: true, text: before ? before.text : "…", children: [] };
    const rootId = before && before.kind === "accepted" ? before.draft : -1;
    const above = ({ parent, position }) =>
      nodes.get(parent) || (parent === rootId && position === round.position ? root : null);
    for (const node of nodes.values()) above(node.draft)?.children.push(node); // what hangs below a dead token is left out
    const last = round.tokens[round.tokens.length - 1];
    if (last && last[1] !== "accepted" && !asking) {
      const tip = nodes.get(round.accepted[round.accepted.length - 1]) || root;
      tip.children.unshift({ target: true, text: last[0], state: last[1], prob: last[2], children: [] });
    }
    return place(root, (n) => (n.draft ? rank(n.draft) : 3));
  }

  function stateIn(draft, round) {
    return draft.fated === round.index ? draft.fate : "waiting";
  }

  /** Columns by depth. The likeliest child stays on its parent's row, another begins the first row that is free in all
   * columns of its branch. */
  function place(root, weight) {
    const all = [];
    const free = []; // of each column: its first free row
    const depth = (node) => 1 + Math.max(0, ...node.children.map(depth));
    const walk = (node, column, row) => {
      Object.assign(node, { column, row });
      free[column] = row + 1;
      all.push(node);
      node.children.sort((a, b) => weight(b) - weight(a));
      node.children.forEach((child, i) => {
        child.parentNode = node;
        const below = free.slice(column + 1, column + 1 + depth(child));
        walk(child, column + 1, i ? Math.max(...below) : row);
      });
    };
    walk(root, 0, 0);
    return { nodes: all, columns: free.length, rows: Math.max(...free) };
  }

  class Tree {
    constructor(picture) {
      this.picture = picture;
      this.title = make("span.dp-tree-title");
      this.release = make("button.dp-button", {
        type: "button",
        text: "back to the newest",
        hidden: true,
        onclick: () => picture.select(-1),
      });
      this.step = (by, text, label) =>
        make("button.dp-button", {
          type: "button",
          text,
          "aria-label": label,
          onclick: () => picture.select(Math.max(0, this.index() + by)),
        });
      this.scroll = make("div.dp-tree-scroll", { tabindex: "0", role: "img", "aria-label": "Draft tree of the round" });
      this.node = make(
        "figure.dp-tree",
        {},
        make(
          "figcaption",
          {},
          make("b", { text: "Draft tree" }),
          this.release,
          make(
            "span.dp-steps",
            {},
            this.step(-1, "‹", "round before"),
            this.title,
            this.step(1, "›", "next round"),
          ),
        ),
        this.scroll,
        (this.words = make("p.dp-tree-words")),
      );
    }

    index() {
      const { answer, round } = this.picture;
      if (round >= 0) return Math.min(round, answer.rounds.length - 1);
      return answer.rounds.findLastIndex(({ tokens }) => tokens.length); // a stopped answer ends with an empty round
    }

    draw() {
      const { answer, selected } = this.picture;
      const index = this.index();
      this.release.hidden = selected < 0;
      if (index < 0) {
        this.title.textContent = "appears with the first round";
        return this.scroll.replaceChildren();
      }
      const round = answer.rounds[index];
      const words = treeWords(answer, index);
      this.title.textContent = `round ${index + 1} of ${answer.rounds.length}`;
      this.scroll.setAttribute("aria-label", words);
      this.scroll.replaceChildren(drawTree(layoutTree(answer, index), round, this.picture.tip));
      this.words.textContent = words;
      return undefined;
    }
  }

  function drawTree({ nodes, columns, rows }, round, tip) {
    const [width, height] = [columns * CELL.width + CELL.pad, rows * CELL.height + CELL.pad];
    const svg = make("svg:svg.dp-tree-svg", {
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      "aria-hidden": "true",
    });
    for (const n of nodes) if (n.parentNode) svg.append(edge(n));
    for (const n of nodes) svg.append(treeNode(n, round, tip));
    return svg;
  }

  const corner = (n) => [CELL.pad / 2 + n.column * CELL.width, CELL.pad / 2 + n.row * CELL.height];

  function edge(n) {
    const [x2, y2] = corner(n);
    const [x1, y1] = corner(n.parentNode);
    const [a, b, c] = [x1 + CELL.box, y1 + CELL.tall / 2, y2 + CELL.tall / 2];
    const bend = (x2 - a) / 2;
    return make(`svg:path.dp-edge.dp-edge-${n.state}`, {
      d: `M${a},${b} C${a + bend},${b} ${x2 - bend},${c} ${x2},${c}`,
    });
  }

  function treeNode(n, round, tip) {
    const [x, y] = corner(n);
    const text = n.draft ? n.draft.text : n.text;
    const state = n.root ? "root" : n.state;
    const sign = { correction: "▲ ", bonus: "✚ " }[state] || (n.draft?.origin === "ngram" ? "❝ " : "");
    let label = sign + shown(text);
    if (label.length > 10) label = `${label.slice(0, 9)}…`;
    if (state === "ignored") label = `[${label}]`;
    const group = make(
      `svg:g.dp-node.dp-node-${state}${n.pending ? ".dp-node-pending" : ""}`,
      { transform: `translate(${x},${y})` },
      make("svg:rect", { width: CELL.box, height: CELL.tall, rx: n.draft?.origin === "ngram" ? 1 : 6 }),
      make("svg:text.dp-node-text", { x: CELL.box / 2, y: CELL.tall / 2 + 1, text: label }),
      make("svg:text.dp-node-small", { x: CELL.box / 2, y: CELL.tall + 9, text: nodeNote(n) }),
    );
    if (tip) {
      group.addEventListener("pointermove", () =>
        tip.show(group.getBoundingClientRect(), tipContent(describeNode(n))),
      );
      group.addEventListener("pointerleave", () => tip.hide());
    }
    return group;
  }

  function nodeNote(n) {
    if (n.root) return "so far";
    if (n.target) return `target ${percent(n.prob)}`;
    const target =
      isNumber(n.draft.targetProb) && n.state !== "waiting" && n.pending ? ` → ${percent(n.draft.targetProb)}` : "";
    return percent(n.draft.prob) + target;
  }

  Object.assign(window.duochat, { Tree, layoutTree, drawTree });
})();
