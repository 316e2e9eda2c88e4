// Turns Markdown into nodes of the page. A model's answer is hostile input, so no HTML is made from it or parsed. The
// parser gives tokens; this file makes an element for each token, with only a few kinds of elements and attributes. Raw
// HTML stays text.

import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";

import { codeBlock } from "./code.js";
import { allowance, formula, readMaths } from "./maths.js";

const LINKED = new Set(["http:", "https:", "mailto:"]);
const ELEMENTS = new Set("p ul ol li blockquote table thead tbody tr th td em strong s hr br h2 h3 h4 h5 h6".split(" "));

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // main.py is a file, not a host in Paraguay
parser.validateLink = isLinked; // a refused link stays text
readMaths(parser);

// Returns the whole text as a DocumentFragment.
export function renderMarkdown(text) {
  const whole = document.createDocumentFragment();
  whole.append(...blocks(text, {}).map(({ node }) => node));
  return whole;
}

// Returns the blocks of a text, each as {at: the position of the block in the text, node}. `env` keeps the definitions
// of links for later texts. `env.open` says that the text is not complete, so that its last block is shown as a part.
export function blocks(text, env) {
  const lines = [0, ...Array.from(text.matchAll(/\r\n?|\n/g), (end) => end.index + end[0].length)];
  const count = lines.length - (lines.at(-1) === text.length ? 1 : 0);
  const isCutOff = (token) => Boolean(env.open) && token.map[1] >= count;
  const found = [];
  let group = [];
  for (const token of parser.parse(text, env)) {
    group.push(token);
    if (token.level || token.nesting === 1) continue;
    found.push({ at: lines[group[0].map[0]], node: build(group, document.createDocumentFragment(), isCutOff, allowance()).firstChild });
    group = [];
  }
  return found;
}

// Appends the elements of `tokens` to `root`. The last element of `stack` is the one that is being filled.
function build(tokens, root, isCutOff, allowed) {
  const stack = [root];
  for (const token of tokens) {
    const parent = stack.at(-1);
    if (token.nesting < 0) stack.pop();
    else if (token.nesting > 0) stack.push(token.hidden ? parent : open(token, parent));
    else if (token.type === "inline") build(token.children, parent, isCutOff, allowed);
    else parent.append(leaf(token, isCutOff, allowed));
  }
  return root;
}

// Adds the element of a token to its parent, and returns it.
function open(token, parent) {
  if (token.type === "link_open") return parent.appendChild(link(token.attrGet("href")));
  const node = element(token.type === "heading_open" ? `h${Math.min(6, Number(token.tag[1]) + 1)}` : token.tag); // h1 is the page's own heading
  if (token.type === "ordered_list_open") node.start = token.attrGet("start") ?? 1;
  const aligned = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "");
  if (aligned) node.style.textAlign = aligned[1];
  if (token.type === "table_open") parent = parent.appendChild(scrolling());
  return parent.appendChild(node);
}

// Returns a box in which a wide table can be scrolled, also with the keyboard.
function scrolling() {
  const box = document.createElement("div");
  return Object.assign(box, { className: "wide", tabIndex: 0, role: "region", ariaLabel: "Table" });
}

const element = (tag) => document.createElement(ELEMENTS.has(tag) ? tag : "span");

function leaf(token, isCutOff, allowed) {
  switch (token.type) {
    case "softbreak":
    case "hardbreak":
      return element("br");
    case "hr":
      return element("hr");
    case "code_inline":
      return Object.assign(document.createElement("code"), { textContent: token.content });
    case "fence":
    case "code_block":
      return codeBlock(token.content.replace(/\n$/, ""), token.info.trim().split(/\s+/)[0], isCutOff(token));
    case "maths_inline":
      return formula(token, "span", allowed);
    case "maths_block":
      return formula(token, "div", allowed);
    case "image":
      return refused(token);
    default:
      return token.content;
  }
}

function isLinked(address) {
  return URL.canParse(address) && LINKED.has(new URL(address).protocol);
}

function link(address) {
  if (!isLinked(address)) return element("span");
  return Object.assign(document.createElement("a"), { href: address, target: "_blank", rel: "noopener noreferrer" });
}

// Shows the description of an image instead of the image: loading it would send a request to an address that the model
// chose, with any data that the model put into the address.
function refused(token) {
  const node = link(token.attrGet("src"));
  node.className = "refused";
  node.textContent = `image not loaded: ${token.content || "without a description"}`;
  return node;
}
