// The field for the next question and its files. A question that is not sent yet is kept as a draft of this browser
// tab, one draft for each conversation, so that a reload does not lose it.

import { Attached } from "./files.js";

const keyOf = (name) => `draft ${name}`;

export class Composer {
  #name = ""; // the name of the draft
  #apiFormat;

  // `on` has `send()`, called by the keys and the button; `changed()`, called after each input; and `extras()`, which
  // returns the additions to keep with the draft.
  constructor(root, apiFormat, on) {
    const form = root.querySelector(".composer");
    this.#apiFormat = apiFormat;
    this.on = on;
    this.input = form.querySelector("textarea");
    this.input.placeholder = apiFormat.placeholder;
    this.input.setAttribute("aria-label", apiFormat.send);
    this.attached = new Attached(root, apiFormat.takesFiles, () => this.#note());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      on.send();
    });
    this.input.addEventListener("input", () => this.#note());
    this.input.addEventListener("keydown", (event) => sendsBy(event, apiFormat) && on.send());
  }

  get isEmpty() {
    return !this.input.value.trim();
  }

  // The question and the files that would be sent now: {question, files}.
  get asked() {
    return { question: this.input.value, files: this.attached.files };
  }

  fill(text) {
    this.input.value = text;
    this.#note();
  }

  // Called when the question has been sent.
  clear() {
    if (this.#apiFormat.enterSends) this.input.value = "";
    this.attached.show([]);
    this.#note();
  }

  // Shows and returns the draft of this name. The draft that was shown before stays kept under its own name.
  open(name) {
    this.#name = name;
    const draft = JSON.parse(sessionStorage.getItem(keyOf(name)) ?? "{}");
    this.input.value = draft.question ?? "";
    this.attached.show(draft.files ?? []);
    return draft;
  }

  // Gives the draft another name. Called when its conversation gets an id.
  rename(name) {
    sessionStorage.removeItem(keyOf(this.#name));
    this.#name = name;
    this.keep();
  }

  keep() {
    const draft = { ...this.asked, extras: this.on.extras() };
    try {
      if (draft.question || draft.files.length || Object.keys(draft.extras).length) sessionStorage.setItem(keyOf(this.#name), JSON.stringify(draft));
      else sessionStorage.removeItem(keyOf(this.#name));
    } catch {
      sessionStorage.removeItem(keyOf(this.#name)); // the files are too large for the tab's storage
    }
  }

  #note() {
    this.keep();
    this.on.changed();
  }
}

// Returns whether a key event sends the typed text. If it does, the key has no other effect.
export function sendsBy(event, apiFormat) {
  const sends = event.ctrlKey || event.metaKey || (apiFormat.enterSends && !event.shiftKey);
  if (event.key !== "Enter" || event.isComposing || !sends) return false;
  event.preventDefault();
  return true;
}
