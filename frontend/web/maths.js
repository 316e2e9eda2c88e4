// Formulas between $ $, \( \), $$ $$ and \[ \]: rules for the Markdown parser, and their rendering with KaTeX.

import "./vendor/katex.min.js";

const { katex } = globalThis;
const DELIMITERS = [["$$", "$$"], ["\\[", "\\]"], ["\\(", "\\)"], ["$", "$"]];
const DISPLAYED = DELIMITERS.slice(0, 2);
const LONGEST = 10_000; // a formula in a line is at most so long
const MOST_SHOWN = 20_000; // characters of formulas in a block; more are shown as their source, because KaTeX takes long
// `trust` would allow links and images. `maxSize` is in em.
const OPTIONS = { trust: false, throwOnError: true, strict: "ignore", maxSize: 30, maxExpand: 300 };
const MIN_COST = 20; // of the shortest formula, in characters of a long one
const STYLED = /\\(pmb|fcolorbox)/; // for these, KaTeX writes MathML with style attributes, which the page's policy refuses

export function readMaths(parser) {
  parser.inline.ruler.before("escape", "maths_inline", readInline);
  parser.block.ruler.before("fence", "maths_block", readBlock, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

function push(state, type, [open, close], content) {
  const token = state.push(type, "", 0);
  Object.assign(token, { content: content.trim(), markup: open, info: close });
  return token;
}

function readInline(state, silent) {
  const delimiters = DELIMITERS.find(([open]) => state.src.startsWith(open, state.pos));
  if (!delimiters) return false;
  const content = between(state, ...delimiters);
  if (content === null) return false;
  if (!silent) push(state, "maths_inline", delimiters, content);
  state.pos += delimiters[0].length + content.length + delimiters[1].length;
  return true;
}

// Returns the formula at the start of `text`, without its delimiters; null if there is none. A single $ may be a price,
// so a formula between single $ has no space next to its delimiters and no digit after them.
function between(state, open, close) {
  const { src, pos } = state;
  const single = /^\$(?![\s$])((?:\\[^]|[^\\$])*?)(?<!\s)\$(?!\d)/;
  if (open === "$") return single.exec(src.slice(pos, pos + LONGEST))?.[1] || null;
  const end = closing(state, close, pos + open.length);
  if (end > pos + LONGEST) return null;
  const content = src.slice(pos + open.length, end);
  return content.trim() ? content : null;
}

// Returns where `close` comes next; Infinity if it does not. All openings before it share one search, so
// that a text of nothing but openings is read once.
function closing(state, close, from) {
  const known = (state.mathsEnds ??= {});
  if (!(known[close] >= from)) {
    const found = state.src.indexOf(close, from);
    known[close] = found < 0 ? Infinity : found;
  }
  return known[close];
}

// Reads a displayed formula, which begins at the start of a line and ends at the end of a line. Its lines are not
// Markdown. If a formula that begins in one line has no end, those that begin in the lines up to there have none, either;
// so they are not searched again.
function readBlock(state, first, last, silent) {
  const start = state.bMarks[first] + state.tShift[first];
  const delimiters = DISPLAYED.find(([open]) => state.src.startsWith(open, start));
  if (!delimiters || state.sCount[first] - state.blkIndent >= 4) return false;
  const [from, to] = state.mathsEndless?.[delimiters[1]] ?? [0, 0];
  if (first > from && first < to && !state.env.open) return false;
  const lines = [];
  let line = first;
  for (; line < last && (state.isEmpty(line) || state.sCount[line] >= state.blkIndent); line++) {
    const text = line > first ? state.getLines(line, line + 1, state.blkIndent, false) : state.src.slice(start + 2, state.eMarks[line]);
    const end = text.indexOf(delimiters[1]);
    lines.push(end < 0 ? text : text.slice(0, end));
    if (end < 0) continue;
    if (!text.slice(end + 2).trim()) return finishBlock(state, delimiters, lines, first, silent);
    (state.mathsEndless ??= {})[delimiters[1]] = [first, line];
    return false;
  }
  (state.mathsEndless ??= {})[delimiters[1]] = [first, line];
  return Boolean(state.env.open) && finishBlock(state, [delimiters[0], ""], lines, first, silent); // the end of the formula has not arrived
}

function finishBlock(state, delimiters, lines, first, silent) {
  if (silent) return true;
  push(state, "maths_block", delimiters, lines.join("\n")).map = [first, first + lines.length];
  state.line = first + lines.length;
  return true;
}

// How much of KaTeX's work is left for a block.
export const allowance = () => ({ left: MOST_SHOWN });

// Returns an element with the formula of a token, or with its source if it is incomplete, if KaTeX cannot read it, or if
// nothing of the block's allowance is left for it.
export function formula({ content, markup, info }, tag, allowed) {
  const node = document.createElement(tag);
  const displayMode = DISPLAYED.some(([open]) => open === markup);
  node.className = displayMode ? "formula displayed" : "formula";
  const output = STYLED.test(content) ? "html" : "htmlAndMathml";
  try {
    if (!info) throw new Error("not whole");
    if ((allowed.left -= content.length + MIN_COST) < 0) throw new Error("too much");
    katex.render(content, node, { ...OPTIONS, displayMode, output });
    if (output === "html") Object.assign(node, { role: "math", ariaLabel: content });
  } catch {
    node.replaceChildren(markup + content + info);
    node.classList.add("source");
  }
  return node;
}
