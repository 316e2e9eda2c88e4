// An answer on the page while it comes. Pieces are put in once a frame, so a fast stream costs no more than a slow one.

import { timingLine } from "./timing.js";
import { tokenSpan } from "./tokens.js";

export const copyOf = (id) => document.getElementById(id).content.cloneNode(true);

export class Answer {
  text = "";
  #log;
  #pending = [];
  #frame = 0;
  #count = 0; // tokens shown as spans
  #sent = performance.now();
  #first = 0;
  #last = 0;
  #end = {}; // {finish, stop, seed, usage, timings}

  constructor(log, question) {
    this.#log = log;
    const fresh = copyOf("turn");
    this.article = fresh.querySelector("article");
    const part = (name) => this.article.querySelector(name);
    [this.box, this.error, this.timing] = [part(".answer"), part(".error"), part(".timing")];
    part(".question").textContent = question;
    this.article.dataset.state = "running";
    log.append(fresh);
    log.scrollTop = log.scrollHeight;
  }

  take(chunk, dialect, decoder) {
    const choice = chunk.choices[0];
    if (choice) this.#takeChoice(choice, dialect, decoder);
    if (choice?.finish_reason) Object.assign(this.#end, { finish: choice.finish_reason, stop: choice.stop_reason, seed: chunk.seed });
    if (chunk.usage) Object.assign(this.#end, { usage: chunk.usage, timings: chunk.timings });
  }

  #takeChoice(choice, dialect, decoder) {
    const text = dialect.text(choice);
    const tokens = dialect.tokens(choice, decoder);
    if (!text && !tokens.length) return;
    this.#last = performance.now();
    this.#first ||= this.#last;
    this.text += text;
    this.#pending.push(...(tokens.length ? tokens : [text]));
    this.#frame ||= requestAnimationFrame(() => this.#flush());
  }

  #flush() {
    this.#frame = 0;
    const log = this.#log;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    for (const piece of this.#pending.splice(0)) {
      if (typeof piece !== "string") this.box.append(tokenSpan(piece, this.#count++ === 0));
      else if (this.box.lastChild instanceof Text) this.box.lastChild.appendData(piece);
      else this.box.append(piece);
    }
    if (follows) log.scrollTop = log.scrollHeight;
  }

  #close(state) {
    cancelAnimationFrame(this.#frame);
    this.article.dataset.state = state;
    const clock = { ttft: this.#first - this.#sent, span: this.#last - this.#first, began: this.#first > 0 };
    this.timing.textContent = timingLine(state, clock, this.#end);
    this.#flush();
  }

  finish() {
    this.#close("done");
  }

  // Returns the text so far.
  stop() {
    this.#close("stopped");
    return this.text;
  }

  fail(error) {
    const retry = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    const where = error.param ? ` (field: ${error.param})` : "";
    const status = error.status ? `${error.status}: ` : "";
    this.error.textContent = `${status}${error.message}${where}.${retry}`;
    this.error.hidden = false;
    this.#close("failed");
    this.#log.scrollTop = this.#log.scrollHeight;
  }
}
