// One tab: its questions and answers, and the buttons around them. dialects.js knows how chat and completion differ;
// Answer shows an answer while it streams.

import { Answer } from "./answer.js";
import { Failure, apiKey, model, stream } from "./api.js";
import { closeCalls, copyOf } from "./calls.js";
import { Extras } from "./extras.js";
import { blame, sampling, showsProbabilities } from "./knobs.js";
import { watch } from "./tokens.js";

export class Panel {
  #dialect;
  // {question or results, text, thought, calls, answered, article}; only the answered ones are part of the conversation
  #turns = [];
  #running = null; // the AbortController of the answer that is streaming
  #last = ""; // the body of the last request

  constructor(root, dialect) {
    root.append(copyOf("panel"));
    const find = (selector) => root.querySelector(selector);
    this.#dialect = dialect;
    this.log = find(".log");
    this.input = find(".composer textarea");
    this.extras = new Extras(find(".extras"), dialect.extras);
    this.buttons = Object.fromEntries(["send", "stop", "again", "clear", "curl"].map((name) => [name, find(`.${name}`)]));
    root.dataset.kind = dialect.name;
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
    this.#ask({ question });
  }

  regenerate() {
    const turn = this.#running ? undefined : this.#turns.pop();
    if (!turn) return;
    turn.article.remove();
    this.#ask(turn);
  }

  clear() {
    this.#running?.abort();
    this.#turns = [];
    this.log.replaceChildren();
    this.#enable();
    this.input.focus();
  }

  async #ask({ question, results }) {
    const running = (this.#running = new AbortController());
    const answer = new Answer(this.log, question);
    const turn = { question, results, answered: false, article: answer.article };
    const earlier = this.#answered();
    this.#turns.push(turn);
    this.#enable();
    closeCalls(this.log);
    blame(null, this.extras.fields);
    try {
      const body = (this.#last = await this.#body(turn, earlier));
      const decoder = new TextDecoder();
      for await (const chunk of stream(this.#dialect.path, body, running.signal)) answer.take(chunk, this.#dialect, decoder);
      answer.finish();
      turn.answered = true;
    } catch (error) {
      if (running.signal.aborted) answer.stop();
      else this.#fail(answer, error);
      turn.answered = running.signal.aborted && answer.text !== "";
    }
    const calls = answer.asksForCalls ? answer.calls.list : [];
    Object.assign(turn, { text: answer.text, thought: answer.thought, calls });
    if (this.#running === running) this.#running = null;
    this.#enable();
    if (calls.length) answer.offer((results) => this.#ask({ question: null, results }));
  }

  #fail(answer, error) {
    if (!(error instanceof Failure)) console.error(error);
    answer.fail(error);
    blame(error.param, this.extras.fields);
  }

  #answered() {
    return this.#turns.filter((turn) => turn.answered);
  }

  // The request as JSON text.
  async #body(turn, earlier) {
    const fields = {
      model: JSON.stringify(await model()),
      ...this.#dialect.question(turn, earlier, this.extras.system),
      ...this.extras.asked,
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
    const focus = document.activeElement;
    send.disabled = busy || !this.input.value.trim();
    stop.disabled = !busy;
    again.disabled = busy || !this.#turns.length;
    clear.disabled = !this.#turns.length;
    curl.disabled = !this.#last && !this.input.value.trim();
    if (focus.disabled) (busy ? stop : this.input).focus();
    this.log.setAttribute("aria-busy", String(busy));
  }

  // The request that would be sent now or, with nothing typed, the last one. The shell fills in the key.
  async #copyCurl() {
    const { curl } = this.buttons;
    const typed = this.input.value.trim() && !this.#running;
    try {
      const body = typed ? await this.#body({ question: this.input.value }, this.#answered()) : this.#last;
      const key = apiKey.get() ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : "";
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
