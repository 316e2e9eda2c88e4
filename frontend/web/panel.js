// One tab: its questions and answers, and the buttons around them. What chat and completion say differently is in the
// dialect; what an answer looks like while it comes is in Answer.

import { Failure, apiKey, model, stream } from "./api.js";
import { blame, sampling, showsProbabilities } from "./knobs.js";
import { tokenSpan, watch } from "./tokens.js";
import { timingLine } from "./timing.js";

const copyOf = (id) => document.getElementById(id).content.cloneNode(true);

export class Panel {
  #dialect;
  #turns = []; // {question, text, answered, article}; only the answered ones are part of the conversation
  #running = null; // the AbortController of the answer that is coming
  #last = ""; // the body of the last request

  constructor(root, dialect) {
    root.append(copyOf("panel"));
    const find = (selector) => root.querySelector(selector);
    this.#dialect = dialect;
    this.log = find(".log");
    this.input = find(".composer textarea");
    this.system = find(".system textarea");
    this.buttons = Object.fromEntries(["send", "stop", "again", "clear", "curl"].map((name) => [name, find(`.${name}`)]));
    root.dataset.kind = dialect.name;
    find(".system").hidden = !dialect.hasSystem;
    this.buttons.send.textContent = dialect.send;
    this.input.placeholder = dialect.placeholder;
    this.input.setAttribute("aria-label", dialect.send);
    this.log.setAttribute("aria-label", `Answers: ${dialect.name}`);
    this.#listen(find(".composer"));
    watch(this.log);
    this.#enable();
  }

  #listen(form) {
    const { stop, again, clear, curl } = this.buttons;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("input", () => this.#enable());
    this.input.addEventListener("keydown", (event) => {
      const sends = event.ctrlKey || event.metaKey || (this.#dialect.enterSends && !event.shiftKey);
      if (event.key !== "Enter" || event.isComposing || !sends) return;
      event.preventDefault();
      this.send();
    });
    stop.addEventListener("click", () => this.#running?.abort());
    form.parentElement.addEventListener("keydown", (event) => event.key === "Escape" && this.#running?.abort());
    again.addEventListener("click", () => this.regenerate());
    clear.addEventListener("click", () => this.clear());
    curl.addEventListener("click", () => this.#copyCurl());
  }

  send() {
    const question = this.input.value;
    if (this.#running || !question.trim()) return;
    if (this.#dialect.enterSends) this.input.value = "";
    this.#ask(question);
  }

  regenerate() {
    const turn = this.#running ? undefined : this.#turns.pop();
    if (!turn) return;
    turn.article.remove();
    this.#ask(turn.question);
  }

  clear() {
    this.#running?.abort();
    this.#turns = [];
    this.log.replaceChildren();
    this.#enable();
    this.input.focus();
  }

  async #ask(question) {
    const running = (this.#running = new AbortController());
    const answer = new Answer(this.log, question);
    const turn = { question, text: "", answered: false, article: answer.article };
    const decoder = new TextDecoder();
    try {
      const body = await this.#body(question, this.#turns.filter((turn) => turn.answered));
      this.#turns.push(turn);
      this.#enable();
      this.#last = body;
      for await (const chunk of stream(this.#dialect.path, body, running.signal)) answer.take(chunk, this.#dialect, decoder);
      answer.finish();
      turn.answered = true;
    } catch (error) {
      if (!this.#turns.includes(turn) && answer.article.isConnected) this.#turns.push(turn);
      if (running.signal.aborted) turn.answered = answer.stop() !== "";
      else this.#fail(answer, error);
    }
    turn.text = answer.text;
    if (this.#running === running) this.#running = null;
    this.#enable();
  }

  #fail(answer, error) {
    if (!(error instanceof Failure)) console.error(error);
    answer.fail(error);
    blame(error.param);
  }

  // The request as JSON text.
  async #body(question, answered) {
    const fields = {
      model: JSON.stringify(await model()),
      ...this.#dialect.question(question, answered, this.system.value.trim()),
      ...sampling(),
      ...(showsProbabilities() && this.#dialect.probabilities),
      stream: "true",
      stream_options: '{"include_usage":true}',
      timings: "true",
    };
    return `{${Object.entries(fields).map(([name, json]) => `${JSON.stringify(name)}:${json}`).join(",")}}`;
  }

  #enable() {
    const busy = this.#running !== null;
    const { send, stop, again, clear, curl } = this.buttons;
    send.disabled = busy || !this.input.value.trim();
    stop.disabled = !busy;
    again.disabled = busy || !this.#turns.length;
    clear.disabled = !this.#turns.length;
    curl.disabled = !this.#last && !this.input.value.trim();
    this.log.setAttribute("aria-busy", String(busy));
  }

  // What would be sent now or, with nothing typed, what was sent last. A key is left for the shell to fill in.
  async #copyCurl() {
    const { curl } = this.buttons;
    const typed = this.input.value.trim() && !this.#running;
    try {
      const body = typed ? await this.#body(this.input.value, this.#turns.filter((turn) => turn.answered)) : this.#last;
      const key = apiKey.get() ? ` \\\n  -H "Authorization: Bearer $SLUICE_API_KEY"` : "";
      const url = new URL(this.#dialect.path, location.href).href;
      const quoted = body.replaceAll("'", "'\\''");
      await copy(`curl -N '${url}' \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'\n`);
      curl.textContent = "Copied";
    } catch {
      curl.textContent = "Could not copy";
    }
    setTimeout(() => (curl.textContent = "Copy as curl"), 1500);
  }
}

// Browsers offer the clipboard to https and localhost only; elsewhere the old way still works.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.body.appendChild(document.createElement("textarea"));
  area.value = text;
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("no clipboard");
}

// An answer on the page while it comes. Pieces are put in once a frame, so a fast stream costs no more than a slow one.
class Answer {
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
