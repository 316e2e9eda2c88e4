// Text files and pictures that go with a question: read in the browser, checked, listed, and put into the message. A
// text file is {name, size, text}; a picture has its data: URL, as `picture`, and no text.

import { Failure } from "./api.js";

const MOST_BYTES = 512 * 1024;
const MOST_PICTURE_BYTES = 5 * 1024 * 1024; // the server takes bodies of 8 MiB, and base64 adds a third
const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 999_500 ? `${Number((bytes / 1000).toPrecision(3))} kB` : `${Number((bytes / 1e6).toPrecision(3))} MB`;
}

// Whether a text is the data: URL of a picture.
export const isPicture = (url) => PICTURES.some((type) => url.startsWith(`data:${type};base64,`));

const unreadable = (file) => () => {
  throw new Failure(`${file.name} cannot be read`);
};

// Reads a file into the form above. Throws a Failure for a file that is too large, or neither a picture nor text.
function read(file) {
  const [isSeen, most] = PICTURES.includes(file.type) ? [true, MOST_PICTURE_BYTES] : [false, MOST_BYTES];
  if (file.size > most) throw new Failure(`${file.name} has ${size(file.size)}: ${isSeen ? "pictures" : "files"} up to ${size(most)} can be attached`);
  return isSeen ? readPicture(file) : readText(file);
}

async function readPicture(file) {
  const reader = new FileReader();
  const url = new Promise((resolve, reject) => {
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
  });
  reader.readAsDataURL(file);
  return { name: file.name, size: file.size, text: "", picture: await url.catch(unreadable(file)) };
}

async function readText(file) {
  const bytes = await file.arrayBuffer().catch(unreadable(file));
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return { name: file.name, size: file.size, text };
  } catch {
    // the file is not UTF-8
  }
  throw new Failure(`${file.name} is neither text in UTF-8 nor a PNG, JPEG, WebP or GIF picture`);
}

// Returns a text file as fenced Markdown. The fence is longer than any run of backticks in the file, so the file cannot
// end the fence.
function fenced({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `File ${JSON.stringify(name)}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}\n\n`;
}

// Returns a question and its files as the content of a message: a text or, with pictures, the pictures and then the
// text.
export function withFiles(question, files) {
  const text = files.filter(({ picture }) => !picture).map(fenced).join("") + question;
  const pictures = files.filter(({ picture }) => picture).map(({ picture }) => ({ type: "image_url", image_url: { url: picture } }));
  return pictures.length ? [...pictures, { type: "text", text }] : text;
}

// The files that go with the next question: a list with a button to remove each file.
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
      picker.value = ""; // otherwise the same file could not be chosen again
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
        this.files.push(await read(file));
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

  #item({ name, size: bytes, picture }) {
    const [item, button] = [document.createElement("li"), document.createElement("button")];
    if (picture) item.append(image(picture, ""), " "); // no alternative text, as the name stands beside the picture
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

function image(url, text) {
  const element = document.createElement("img");
  element.src = url;
  element.alt = text;
  return element;
}

// Returns elements that show the files of a sent question: each picture, and a fold for each text file.
export function folds(files) {
  return files.map(({ name, size: bytes, text, picture }) => {
    if (picture) return image(picture, name);
    const [fold, summary, content] = ["details", "summary", "pre"].map((tag) => document.createElement(tag));
    fold.className = "file";
    summary.textContent = `${name} · ${size(bytes)}`;
    content.textContent = text;
    content.tabIndex = 0;
    fold.append(summary, content);
    return fold;
  });
}
