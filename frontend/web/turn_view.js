// A turn on the page with the buttons under it: its versions, copy, edit, regenerate, go on.

import { Answer } from "./answer.js";
import { copyOf } from "./calls.js";
import { copyBy } from "./clipboard.js";
import { sendsBy } from "./composer.js";
import { folds } from "./files.js";
import { waitsForResults } from "./turns.js";

export class TurnView {
  #answer;
  #apiFormat;
  #acts;
  #versions = [];

  // `acts`: the actions of the buttons; see panel.js.
  constructor(log, turn, apiFormat, acts) {
    this.turn = turn;
    this.#apiFormat = apiFormat;
    this.#acts = acts;
    this.#answer = new Answer(log, turn, apiFormat.hasMarkdown);
    this.article = this.#answer.article;
    this.#part(".files").append(...folds(turn.files));
    this.#listen();
  }

  #part(selector) {
    return this.article.querySelector(selector);
  }

  #listen() {
    const act = (name, work) => this.#part(`.tools .${name}`).addEventListener("click", ({ target }) => work(target));
    act("prev", () => this.#step(-1));
    act("next", () => this.#step(1));
    act("copy", (button) => copyBy(button, () => this.turn.text));
    act("edit", () => this.#edit());
    act("again", () => this.#acts.again(this.turn));
    act("go", () => this.#acts.goOn(this.turn));
  }

  remove() {
    this.article.remove();
  }

  // Called when more of the answer has arrived.
  follow() {
    this.#answer.follow();
  }

  sayWaiting(count) {
    this.#answer.sayWaiting(count);
  }

  // Shows the turn as it is now. `versions` are all versions of this turn; `next` is the turn after it on the page.
  update(turn, { versions, next, isBusy }) {
    this.turn = this.#answer.turn = turn;
    this.#versions = versions;
    this.#answer.draw();
    const [at, running] = [versions.findIndex(({ id }) => id === turn.id), turn.state === "running"];
    this.#part(".versions").hidden = versions.length < 2;
    this.#part(".which").textContent = `${at + 1} / ${versions.length}`;
    this.#part(".prev").disabled = at === 0;
    this.#part(".next").disabled = at === versions.length - 1;
    this.#part(".tools .copy").hidden = running || !turn.text;
    this.#part(".edit").hidden = turn.question === null;
    this.#part(".go").hidden = running || !turn.request || !turn.clock.first || next !== undefined;
    for (const name of ["edit", "again", "go"]) this.#part(`.tools .${name}`).disabled = isBusy;
    if (next?.results) this.#answer.calls.close(next.results);
    else if (waitsForResults(turn) && !next) this.#answer.offer((results) => this.#acts.give(this.turn, results));
    else this.#answer.calls.close([]);
  }

  // Shows the previous (-1) or next (1) version of the turn, and focuses its buttons.
  #step(by) {
    const at = this.#versions.findIndex(({ id }) => id === this.turn.id);
    const view = this.#acts.choose(this.#versions[at + by]);
    const buttons = by < 0 ? [".prev", ".next"] : [".next", ".prev"];
    buttons.map((name) => view.#part(name)).find((button) => !button.disabled).focus();
  }

  // Puts a field in the place of the question. Escape and Cancel leave the question as it was.
  #edit() {
    if (this.#part(".edited")) return;
    const form = copyOf("edit").querySelector("form");
    const field = form.querySelector("textarea");
    const question = this.#part(".question");
    const end = () => {
      form.remove();
      question.hidden = false;
      this.#part(".tools .edit").focus();
    };
    const send = () => {
      if (!field.value.trim() || this.#part(".tools .edit").disabled) return;
      end();
      this.#acts.edit(this.turn, field.value);
    };
    field.value = this.turn.question;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.preventDefault(); // otherwise the key would also stop the answer
      if (event.key === "Escape") end();
      else if (event.target === field && sendsBy(event, this.#apiFormat)) send();
    });
    form.querySelector(".cancel").addEventListener("click", end);
    question.before(form);
    question.hidden = true;
    field.focus();
  }
}
