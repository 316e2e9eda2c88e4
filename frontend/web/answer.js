// An answer on the page while it streams. Pieces are added once a frame: a fast stream costs no more than a slow one.

import { Calls, copyOf } from "./calls.js";
import { milliseconds, timingLine } from "./timing.js";
import { tokenSpan } from "./tokens.js";

export class Answer {
  text = "";
  thought = "";
  #log;
  #pending = []; // changes of the page, for the next frame
  #frame = 0;
  #count = 0; // tokens shown as spans
  #sent = performance.now();
  #first = 0;
  #last = 0;
  #end = {}; // {finish, stop, seed, usage, timings}

  // `question` is null for results of tool calls, which are shown where they were typed.
  constructor(log, question) {
    this.#log = log;
    const fresh = copyOf("turn");
    this.article = fresh.querySelector("article");
    const part = (name) => this.article.querySelector(name);
    [this.box, this.error, this.timing] = [part(".answer"), part(".error"), part(".timing")];
    [this.fold, this.thoughts] = [part(".thought"), part(".thoughts")];
    this.calls = new Calls(part(".calls"));
    part(".question").textContent = question;
    part(".question").hidden = question === null;
    this.article.dataset.state = "running";
    log.append(fresh);
    log.scrollTop = log.scrollHeight;
  }

  // Whether the model waits for the results of tool calls.
  get asksForCalls() {
    return this.#end.finish === "tool_calls" && this.calls.list.length > 0;
  }

  take(chunk, dialect, decoder) {
    const choice = chunk.choices[0];
    if (choice) this.#takeChoice(dialect.said(choice), dialect.tokens(choice, decoder));
    if (choice?.finish_reason) Object.assign(this.#end, { finish: choice.finish_reason, stop: choice.stop_reason, seed: chunk.seed });
    if (chunk.usage) Object.assign(this.#end, { usage: chunk.usage, timings: chunk.timings });
  }

  #takeChoice({ thought, text, calls }, tokens) {
    if (!thought && !text && !calls.length && !tokens.length) return;
    this.#last = performance.now();
    this.#first ||= this.#last;
    this.text += text;
    this.thought += thought;
    if (thought) this.#think("Thinking…");
    else if (text || calls.length) this.#endThought("Thought for");
    const box = thought ? this.thoughts : this.box;
    if (calls.length) this.#pending.push(() => this.calls.take(calls));
    else for (const piece of tokens.length ? tokens : [thought || text]) this.#pending.push(() => this.#put(box, piece));
    this.#frame ||= requestAnimationFrame(() => this.#follow(() => this.#flush()));
  }

  #think(said) {
    this.fold.hidden = false;
    this.fold.dataset.going = "true";
    const summary = this.fold.querySelector("summary");
    if (summary.textContent !== said) summary.textContent = said;
  }

  #endThought(said) {
    if (!this.fold.dataset.going) return;
    this.fold.querySelector("summary").textContent = `${said} ${milliseconds(this.#last - this.#first)}`;
    delete this.fold.dataset.going;
  }

  // Applies `change`; if the log was scrolled to its end, it stays there.
  #follow(change) {
    const log = this.#log;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    change();
    if (follows) log.scrollTop = log.scrollHeight;
  }

  #flush() {
    this.#frame = 0;
    for (const change of this.#pending.splice(0)) change();
  }

  #put(box, piece) {
    if (typeof piece !== "string") box.append(tokenSpan(piece, this.#count++ === 0));
    else if (box.lastChild instanceof Text) box.lastChild.appendData(piece);
    else box.append(piece);
  }

  #close(state) {
    cancelAnimationFrame(this.#frame);
    const clock = { ttft: this.#first - this.#sent, span: this.#last - this.#first, began: this.#first > 0 };
    this.#follow(() => {
      this.#flush();
      this.#endThought(state === "done" ? "Thought for" : "Thought, not to its end, for");
      this.timing.textContent = timingLine(state, clock, this.#end);
      this.article.dataset.state = state;
    });
  }

  finish() {
    this.#close("done");
  }

  // Shows fields for the results of its calls; `give(messages)` receives them.
  offer(give) {
    this.#follow(() => this.calls.offer(give));
  }

  stop() {
    this.#close("stopped");
  }

  fail(error) {
    const status = error.status ? `${error.status}: ` : "";
    const where = error.param && !error.message.includes(error.param) ? ` (field: ${error.param})` : "";
    this.error.textContent = `${status}${error.message}${where}.${advice(error)}`;
    this.error.hidden = false;
    this.#close("failed");
    this.#log.scrollTop = this.#log.scrollHeight;
  }
}

function advice({ status, retryAfter }) {
  if (status === 401) return " Put a key into the field at the top of the page, then press Regenerate.";
  return retryAfter ? ` Try again in ${retryAfter} s.` : "";
}
