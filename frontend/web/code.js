// A block of code: its language, a button that copies it, and its text in the colours of its syntax.

import hljs from "./vendor/highlight.min.js";

import { copyBy } from "./clipboard.js";

const LONGEST = 100_000; // longer code, in characters, is not coloured

// `isCutOff`: more of the code will follow. It is not coloured yet, as it would have to be coloured again with each
// token.
export function codeBlock(text, language, isCutOff) {
  const node = Object.assign(document.createElement("figure"), { className: "code" });
  const head = document.createElement("figcaption");
  const name = Object.assign(document.createElement("span"), { textContent: language || "text" });
  const button = Object.assign(document.createElement("button"), { type: "button", className: "quiet copy", textContent: "Copy" });
  button.ariaLabel = `Copy the code: ${name.textContent}`;
  head.append(name, button);
  const box = Object.assign(document.createElement("pre"), { tabIndex: 0, role: "region", ariaLabel: `Code: ${name.textContent}` });
  const code = box.appendChild(document.createElement("code"));
  code.append(isCutOff || text.length > LONGEST || !hljs.getLanguage(language) ? text : coloured(text, language));
  node.append(head, box);
  return node;
}

// Makes spans of the highlighter's tree, because its own output is HTML, which this page never parses.
function coloured(text, language) {
  const stack = [document.createDocumentFragment()];
  hljs.highlight(text, { language, ignoreIllegals: true })._emitter.walk({
    addText: (piece) => stack.at(-1).append(piece),
    openNode({ scope = "" }) {
      const span = Object.assign(document.createElement("span"), { className: `syntax-${scope.split(".")[0]}` });
      stack.at(-1).append(span);
      stack.push(span);
    },
    closeNode: () => stack.pop(),
  });
  return stack[0];
}

// One listener serves all blocks of code, because a streaming answer replaces its blocks again and again.
document.addEventListener("click", ({ target }) => {
  if (target.matches(".code .copy")) copyBy(target, () => target.closest(".code").querySelector("code").textContent);
});
