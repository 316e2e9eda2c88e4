// Text files that go with a question: read in the browser, checked, listed, and written into the prompt.

import { Failure } from "./api.js";

const MOST_BYTES = 512 * 1024;

export function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 999_500 ? `${Number((bytes / 1000).toPrecision(3))} kB` : `${Number((bytes / 1e6).toPrecision(3))} MB`;
}

// {name, size, text}. Throws a Failure for a file that is too large or not text.
async function readText(file) {
  if (file.size > MOST_BYTES) throw new Failure(`${file.name} has ${size(file.size)}: files up to ${size(MOST_BYTES)} can be attached`);
  const bytes = await file.arrayBuffer().catch(() => {
    throw new Failure(`${file.name} cannot be read`);
  });
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return { name: file.name, size: file.size, text };
  } catch {
    // not UTF-8
  }
  throw new Failure(`${file.name} is not a text file: only text in UTF-8 can be attached`);
}

// A fence is longer than any run of backticks in the file, so the file cannot end it.
function fenced({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `File ${JSON.stringify(name)}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}\n\n`;
}

// The question as the model reads it.
export const withFiles = (question, files) => files.map(fenced).join("") + question;

// The files that the next question will have: a list with a button to remove each.
export class Attached {
  files = [];
  #list;
  #note;
  #changed;

  constructor(root, isOffered, changed) {
    this.#list = root.querySelector(".attached");
    this.#note = root.querySelector(".note");
    this.#changed = changed;
    const [button, picker] = [root.querySelector(".attach"), root.querySelector(".picker")];
    button.hidden = !isOffered;
    if (!isOffered) return;
    button.addEventListener("click", () => picker.click());
    picker.addEventListener("change", () => {
      this.take([...picker.files]);
      picker.value = ""; // the same file can be chosen again
    });
    root.addEventListener("paste", (event) => this.#takeFrom(event, event.clipboardData));
    root.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
    root.addEventListener("drop", (event) => this.#takeFrom(event, event.dataTransfer));
    this.#list.addEventListener("click", ({ target }) => target.matches("button") && this.#remove(target));
  }

  #takeFrom(event, { files }) {
    if (!files.length) return;
    event.preventDefault();
    this.take([...files]);
  }

  async take(files) {
    const refused = [];
    for (const file of files) {
      try {
        this.files.push(await readText(file));
      } catch (error) {
        refused.push(`${error.message}.`);
      }
    }
    this.show(this.files, refused.join(" "));
  }

  show(files, note = "") {
    this.files = files;
    this.#note.textContent = note;
    this.#list.replaceChildren(...files.map((file) => this.#item(file)));
    this.#list.hidden = !files.length;
    this.#changed();
  }

  #item({ name, size: bytes }) {
    const [item, button] = [document.createElement("li"), document.createElement("button")];
    button.type = "button";
    button.textContent = "×";
    button.setAttribute("aria-label", `Remove ${name}`);
    item.append(`${name} · ${size(bytes)} `, button);
    return item;
  }

  #remove(button) {
    const gone = [...this.#list.children].indexOf(button.parentElement);
    this.show(this.files.filter((_, i) => i !== gone));
    (this.#list.children[Math.min(gone, this.files.length - 1)]?.querySelector("button") ?? this.#list.closest("form").querySelector(".attach")).focus();
  }
}

// What a question had, to be read again: one fold for each file.
export function folds(files) {
  return files.map(({ name, size: bytes, text }) => {
    const [fold, summary, content] = ["details", "summary", "pre"].map((tag) => document.createElement(tag));
    fold.className = "file";
    summary.textContent = `${name} · ${size(bytes)}`;
    content.textContent = text;
    content.tabIndex = 0;
    fold.append(summary, content);
    return fold;
  });
}
