// Draws an account: bars of passes and positions, and the tree of one draft. All text goes in as text, never as markup.

import { numNodes } from "./numbers.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 340, BOTTOM = 92, TOP = 12, LEFT = 26;
const MOST_PASSES = 60, MOST_POSITIONS = 24;
const CLASSES = ["d0", "d1", "d2", "d3"];
const SHOWN = { " ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍" };

const seen = new Map(); // method -> its class, in order of appearance

export function classOf(method) {
  if (!seen.has(method)) seen.set(method, CLASSES[seen.size % CLASSES.length]);
  return seen.get(method);
}

export function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

export function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "–";
}

function shape(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

function bar(kind, x, width, share) {
  const height = share * (BOTTOM - TOP);
  return shape("rect", { class: kind, x, y: BOTTOM - height, width: Math.max(1, width - 1.5), height });
}

function axis(top) {
  return [
    shape("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: BOTTOM, y2: BOTTOM }),
    shape("text", { x: LEFT - 4, y: TOP + 4, "text-anchor": "end" }, top),
    shape("text", { x: LEFT - 4, y: BOTTOM, "text-anchor": "end" }, "0"),
  ];
}

// Per pass a bar as high as its draft, filled as far as it was accepted. pick: called with a pass's index.
export function drawPasses(svg, account, picked, pick) {
  const first = Math.max(0, account.passes.length - MOST_PASSES);
  const shown = account.passes.slice(first);
  const most = Math.max(4, ...shown.map(numNodes));
  const width = Math.min(12, (WIDTH - LEFT) / Math.max(shown.length, 1));
  const marks = axis(String(most));
  shown.forEach((pass, i) => {
    const group = shape("g", { "data-pass": first + i });
    const x = LEFT + 2 + i * width;
    group.append(
      shape("rect", { x, y: 0, width, height: BOTTOM + 8, fill: "transparent" }),
      bar("drafted", x, width, numNodes(pass) / most),
      bar("accepted", x, width, pass.num_accepted / most),
      shape("title", {}, `pass ${first + i + 1}: ${pass.num_accepted} of ${numNodes(pass)} accepted`),
    );
    if (first + i === picked) {
      group.append(shape("rect", { class: "picked", x, y: BOTTOM + 3, width: Math.max(2, width - 1.5), height: 4 }));
    }
    group.addEventListener("click", () => pick(first + i));
    marks.push(group);
  });
  marks.push(shape("text", { x: LEFT, y: BOTTOM + 17 }, `pass ${first + 1} to ${first + shown.length}`));
  svg.replaceChildren(...marks);
  const lengths = account.passes.map(numNodes);
  const mean = lengths.reduce((sum, length) => sum + length, 0) / Math.max(1, lengths.length);
  svg.setAttribute(
    "aria-label",
    `${lengths.length} passes, ${mean.toFixed(1)} tokens drafted in each, at most ${Math.max(0, ...lengths)}`,
  );
}

export function drawPositions(svg, account) {
  const positions = account.positions.slice(0, MOST_POSITIONS);
  const width = Math.min(40, (WIDTH - LEFT) / Math.max(positions.length, 1));
  const marks = axis("1");
  positions.forEach(({ reached, accepted }, i) => {
    const x = LEFT + 2 + i * width;
    const share = accepted / reached;
    const group = shape("g", {});
    group.append(
      bar("drafted", x, width, 1),
      bar("accepted", x, width, share),
      shape("title", {}, `position ${i + 1}: accepted in ${accepted} of ${reached} drafts`),
    );
    const centre = { x: x + width / 2, "text-anchor": "middle" };
    if (positions.length <= 12 || i % 2 === 0) group.append(shape("text", { ...centre, y: BOTTOM + 13 }, String(i + 1)));
    if (positions.length <= 9) group.append(shape("text", { ...centre, y: TOP - 2 }, percent(accepted, reached)));
    marks.push(group);
  });
  svg.replaceChildren(...marks);
  const words = positions.map(({ reached, accepted }, i) => `position ${i + 1} ${percent(accepted, reached)}`);
  svg.setAttribute("aria-label", words.length ? `Accepted: ${words.join(", ")}` : "No draft yet");
}

// -- the tree -------------------------------------------------------------------------------------------------------

export function visible(token) {
  return token.replace(/[ \n\t\r]/g, (letter) => SHOWN[letter]);
}

// pending: the text of the token before. The target's own token stands where the accepted path ends.
export function drawTree(place, pass, pending) {
  const draft = pass.draft ?? { method: "", tokens: [], parents: [], accepted: [] };
  const nodes = draft.tokens.map((token, i) => ({
    token, kind: draft.accepted[i] ? classOf(draft.method) : "", word: draft.accepted[i] ? "accepted" : "not accepted",
    children: [],
  }));
  const root = { token: pending, kind: "pending", word: "the token before", children: [] };
  draft.parents.forEach((parent, i) => (nodes[parent] ?? root).children.push(nodes[i]));
  const end = nodes[draft.accepted.lastIndexOf(true)] ?? root; // parents come before children
  if (pass.tokens.length > pass.num_accepted) {
    end.children.push({ token: pass.tokens.at(-1), kind: "own", word: "the target's own", children: [] });
  }
  const list = element("ul");
  list.append(branch(root));
  place.replaceChildren(list);
}

function branch(node) {
  const item = element("li");
  item.append(mark(node));
  while (node.children.length === 1) {
    node = node.children[0];
    item.append(mark(node));
  }
  if (node.children.length) {
    const list = element("ul");
    for (const child of node.children) list.append(branch(child));
    item.append(list);
  }
  return item;
}

function mark(node) {
  const made = element("span", visible(node.token), `node ${node.kind}`);
  made.title = node.word;
  made.append(element("span", ` (${node.word})`, "hidden"));
  return made;
}

export function passInWords(pass) {
  const time = `${(1000 * pass.pass_seconds).toFixed(0)} ms`;
  if (!pass.draft) return `No draft: one token of the target's own, ${time}`;
  return `${pass.draft.method}: ${pass.num_accepted} of ${numNodes(pass)} accepted, ${pass.tokens.length} tokens in ${time}`;
}
