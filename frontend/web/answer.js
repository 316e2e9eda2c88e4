// The answer of a turn on the page. It is drawn at most once a frame, so a fast stream costs no more than a slow one.

import { Calls, copyOf } from "./calls.js";
import { Prose } from "./prose.js";
import { milliseconds, timingLine } from "./timing.js";
import { tokenSpan } from "./tokens.js";

const LONG_MS = 16; // shorter pauses between two draws are left out

export class Answer {
  #log;
  #frame = 0;
  #pause = 0; // the timer that the next draw waits for; 0: none
  #drawn = { thought: 0, text: 0, tokens: 0 }; // how much of the turn the page shows
  #before = Infinity; // how many waiting requests the server computes before this one
  #hasMarkdown;
  #prose; // the text as Markdown, from its first piece on

  // A turn with results of tool calls has no question to show: the results are shown where they were typed.
  constructor(log, turn, hasMarkdown) {
    this.#log = log;
    this.#hasMarkdown = hasMarkdown;
    this.turn = turn;
    const fresh = copyOf("turn");
    this.article = fresh.querySelector("article");
    const part = (name) => this.article.querySelector(name);
    [this.box, this.error, this.timing] = [part(".answer"), part(".error"), part(".timing")];
    [this.fold, this.thoughts] = [part(".thought"), part(".thoughts")];
    this.calls = new Calls(part(".calls"));
    part(".question").textContent = turn.question;
    part(".question").hidden = turn.question === null;
    log.append(fresh);
  }

  // Called when the turn has changed. Draws it with the next frame or, if the answer has ended, at once. Each draw
  // parses the growing block again, so a pause follows a draw that took long: drawing takes at most a fifth of the
  // time.
  follow() {
    if (this.turn.state !== "running") this.draw();
    else if (!this.#pause) this.#frame ||= requestAnimationFrame(() => this.#drawAndRest());
  }

  #drawAndRest() {
    const start = performance.now();
    this.draw();
    const pause = 4 * (performance.now() - start);
    if (pause < LONG_MS) return;
    this.#pause = setTimeout(() => {
      this.#pause = 0;
      this.follow();
    }, pause);
  }

  // Draws the turn. A log that was scrolled to its end stays at its end.
  draw() {
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#pause);
    this.#frame = this.#pause = 0;
    const log = this.#log;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    this.#drawText();
    this.#drawThought();
    this.calls.show(this.turn.calls);
    this.#drawEnd();
    if (follows) log.scrollTop = log.scrollHeight;
  }

  #drawText() {
    const { thought, text, tokens, scored } = this.turn;
    const drawn = this.#drawn;
    if (!scored) {
      extend(this.thoughts, thought.slice(drawn.thought));
      if (this.#hasMarkdown) this.#drawMarkdown();
      else extend(this.box, text.slice(drawn.text));
    }
    for (const [i, token] of tokens.slice(drawn.tokens).entries()) {
      (token.thinks ? this.thoughts : this.box).append(token.top ? tokenSpan(token, drawn.tokens + i === 0) : token.text);
    }
    this.#drawn = { thought: thought.length, text: text.length, tokens: tokens.length };
  }

  #drawMarkdown() {
    const { text, state } = this.turn;
    if (text) this.#prose ??= new Prose(this.box);
    this.#prose?.show(text, state !== "running");
  }

  #drawThought() {
    const { thought, text, calls, state, clock } = this.turn;
    if (!thought) return;
    const going = state === "running" && !text && !calls.length;
    const whole = state === "done" || text || calls.length;
    const took = milliseconds(clock.thought - clock.first);
    const said = going ? "Thinking…" : `Thought${whole ? "" : ", not to its end,"} for ${took}`;
    const summary = this.fold.querySelector("summary");
    if (summary.textContent !== said) summary.textContent = said;
    this.fold.hidden = false;
    if (going) this.fold.dataset.going = "true";
    else delete this.fold.dataset.going;
  }

  // Shows how many requests are before this one. `count` requests wait at the server, and the queue is first come,
  // first served, so requests that came later are not counted.
  sayWaiting(count) {
    const { state, clock, lost } = this.turn;
    if (state !== "running" || clock.first || lost) return;
    this.#before = Math.min(this.#before, Math.max(0, count - 1));
    this.timing.textContent = count ? `waiting${this.#before ? `, ${this.#before} before you` : ""}` : "";
  }

  #drawEnd() {
    const { state, error } = this.turn;
    this.article.dataset.state = state;
    this.timing.textContent = state === "running" ? repeating(this.turn) : timingLine(this.turn);
    this.error.hidden = state !== "failed";
    const said = state === "failed" ? sentence(error) : "";
    if (this.error.textContent !== said) this.error.textContent = said;
  }

  // Shows fields for the results of the answer's tool calls; `give(messages)` receives the results.
  offer(give) {
    this.calls.offer(give);
  }
}

function repeating({ lost, repeated, text, thought }) {
  if (lost) return `${lost[0].toUpperCase()}${lost.slice(1)}. This answer goes on by itself when the server is back.`;
  if (repeated === null) return "";
  return `Taken up again: the server has repeated ${Math.floor((100 * repeated) / (text.length + thought.length || 1))} % of this text.`;
}

function extend(box, text) {
  if (!text) return;
  if (box.lastChild instanceof Text) box.lastChild.appendData(text);
  else box.append(text);
}

function sentence(error) {
  const status = error.status ? `${error.status}: ` : "";
  const where = error.param && !error.message.includes(error.param) ? ` (field: ${error.param})` : "";
  return `${status}${error.message}${where}.${advice(error)}`;
}

function advice({ status, retryAfter }) {
  if (status === 401) return " Put a key into the field at the top of the page, then press Regenerate or Go on.";
  return retryAfter ? ` Try again in ${retryAfter} s.` : "";
}
