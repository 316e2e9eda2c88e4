// Shows Markdown text that grows. A block is finished when another block follows. Finished blocks are not parsed again:
// while an answer streams, only its last block is. Nodes are reused where possible, with their scroll position,
// selection and focus.

import { blocks } from "./markdown.js";

export class Prose {
  #box;
  #env = { open: true };
  #text = "";
  #read = 0; // number of characters in the finished blocks
  #finished = 0; // number of finished blocks; each is one DOM node

  constructor(box) {
    this.#box = box;
    box.classList.add("prose");
  }

  // Shows `text`, which is all text so far; `isWhole` says that no more will follow.
  show(text, isWhole) {
    if (!text.startsWith(this.#text)) this.#begin();
    this.#text = text;
    this.#env.open = !isWhole;
    if (isWhole && this.#env.references && Object.keys(this.#env.references).length) this.#begin(); // earlier blocks may use links that were defined later
    const found = blocks(text.slice(this.#read), this.#env);
    fill(this.#box, this.#finished, found.map(({ node }) => node));
    const open = found.at(-1);
    if (found.length < 2) return;
    this.#finished += found.length - 1;
    this.#read += open.at;
  }

  #begin() {
    this.#read = this.#finished = 0;
  }
}

// Makes the children of `box`, from index `start` on, equal to `nodes`; reuses the nodes that are there.
function fill(box, start, nodes) {
  while (box.childNodes.length > start + nodes.length) box.lastChild.remove();
  for (const [i, node] of nodes.entries()) {
    const old = box.childNodes[start + i];
    if (!old) box.append(node);
    else become(old, node);
  }
}

function become(old, node) {
  if (old.isEqualNode(node)) return;
  if (old instanceof Text && node instanceof Text) change(old, node.data);
  else if (old instanceof Text || node instanceof Text || !old.cloneNode(false).isEqualNode(node.cloneNode(false))) old.replaceWith(node);
  else fill(old, 0, [...node.childNodes]);
}

function change(text, data) {
  if (data.startsWith(text.data)) text.appendData(data.slice(text.length));
  else text.data = data;
}
