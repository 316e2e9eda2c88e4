// One tab of the page: the conversation that it shows, and the buttons around it. api_formats.js knows how chat and
// completion differ, tree.js knows the versions of turns, and runs.js the answers that are being generated.

import { Failure } from "./api.js";
import { copyOf } from "./calls.js";
import { copyBy } from "./clipboard.js";
import { Composer } from "./composer.js";
import { Extras } from "./extras.js";
import { blame, sampling, showsProbabilities } from "./knobs.js";
import { bodyOf, curl } from "./request.js";
import * as store from "./store.js";
import { watch } from "./tokens.js";
import { Tree } from "./tree.js";
import { TurnView } from "./turn_view.js";
import { drawnSeed, isAnswered, newId, newTurn, plain } from "./turns.js";

const titleOf = (question) => {
  const words = question.trim().split(/\s+/).slice(0, 7).join(" ");
  return words.length > 60 ? `${words.slice(0, 60)}…` : words;
};

export class Panel {
  #apiFormat;
  #runs;
  #tree = new Tree();
  #views = new Map(); // id of a turn → its TurnView
  #opening = null; // a Symbol for the latest call of `open`
  #last = ""; // the body of the last request
  id = ""; // the id of the conversation that is shown; "" until the first question is asked

  // `moved(panel)` is called when the panel shows another conversation without a call of `open` or `begin`.
  constructor(root, apiFormat, runs, moved) {
    root.append(copyOf("panel"));
    const find = (selector) => root.querySelector(selector);
    this.#apiFormat = apiFormat;
    this.#runs = runs;
    this.moved = moved;
    this.log = find(".log");
    this.extras = new Extras(find(".extras"), apiFormat.extras);
    this.buttons = Object.fromEntries(["send", "stop", "fresh", "curl"].map((name) => [name, find(`.${name}`)]));
    root.dataset.kind = apiFormat.name;
    this.buttons.send.textContent = apiFormat.send;
    this.log.setAttribute("aria-label", `Answers: ${apiFormat.name}`);
    const on = { send: () => this.send(), changed: () => this.#enable(), extras: () => (this.id ? {} : this.extras.values) };
    this.composer = new Composer(root, apiFormat, on);
    this.extras.root.addEventListener("input", () => this.#keepExtras());
    this.#listen(root);
    watch(this.log);
  }

  #listen(root) {
    const { stop, curl } = this.buttons;
    stop.addEventListener("click", () => this.#stop());
    root.addEventListener("keydown", (event) => event.key === "Escape" && !event.defaultPrevented && this.#stop());
    curl.addEventListener("click", () => this.#copyCurl());
    this.#runs.addEventListener("draw", ({ detail: turn }) => turn.conversation === this.id && this.#follow(turn));
    store.changes.addEventListener("change", ({ detail }) => detail.conversation === this.id && this.#see(detail));
  }

  // Shows the conversation with this id. With "", shows none, and the next question begins a conversation.
  async open(id) {
    const opening = (this.#opening = Symbol(id));
    const [conversation, turns] = id ? await Promise.all([store.conversation(id), store.turnsOf(id)]) : [null, []];
    if (opening !== this.#opening) return; // another conversation was chosen meanwhile
    this.id = conversation ? id : "";
    for (const view of this.#views.values()) view.remove();
    this.#views.clear();
    this.#tree = new Tree(turns.map((turn) => this.#runs.turn(turn.id) ?? turn), conversation?.chosen);
    this.#last = this.#tree.path.at(-1)?.request ?? "";
    const draft = this.composer.open(this.id || this.#apiFormat.name);
    this.extras.fill(conversation?.extras ?? draft.extras ?? {});
    this.log.setAttribute("aria-live", "off"); // until a new question is asked
    this.#draw();
    this.log.scrollTop = this.log.scrollHeight;
  }

  // Begins a new conversation. The system prompt, tools and JSON schema stay as they are.
  async begin() {
    const { values } = this.extras;
    await this.open("");
    this.extras.fill(values);
    this.composer.keep();
    this.composer.input.focus();
  }

  #keepExtras() {
    const { values } = this.extras;
    if (this.id) store.change(this.id, (conversation) => (conversation.extras = values), true);
    else this.composer.keep();
  }

  send() {
    if (this.#tree.isBusy || this.composer.isEmpty) return;
    const { asked } = this.composer;
    this.composer.clear();
    this.#ask(this.#tree.path.at(-1)?.id ?? null, asked);
  }

  #stop() {
    if (this.#tree.isBusy) this.#runs.stop(this.id);
  }

  // Asks a question after the turn `parent`, or at the beginning if `parent` is null. Everything that the request needs
  // is read before the first `await`, because another conversation may be opened meanwhile.
  async #ask(parent, asked) {
    const isNew = !this.id;
    this.id ||= newId();
    const turn = newTurn(this.id, this.#apiFormat.name, parent, asked);
    turn.scored = showsProbabilities();
    const extras = this.extras.values;
    const request = this.#begun(turn);
    request.catch(() => {}); // #start reports the error
    this.#tree.put(turn);
    this.#tree.choose(turn);
    const { chosen } = this.#tree;
    this.log.removeAttribute("aria-live");
    this.#draw();
    this.log.scrollTop = this.log.scrollHeight;
    if (isNew) await this.#create(turn);
    await store.keep({ ...turn, state: "failed", error: plain(new Failure("the page was closed before the question was sent")) });
    store.change(turn.conversation, (conversation) => {
      Object.assign(conversation, { changed: Date.now(), chosen: { ...conversation.chosen, ...chosen }, extras });
    });
    await this.#start(turn, request);
  }

  async #create({ conversation: id, created, question }) {
    this.composer.rename(id);
    this.moved(this);
    const title = titleOf(question ?? "") || "Untitled";
    await store.create({ id, kind: this.#apiFormat.name, title, created, changed: created, chosen: {}, extras: {} });
  }

  // Returns a promise of the request as JSON text.
  #begun(turn) {
    blame(null, this.extras.fields);
    try {
      return bodyOf(this.#fields(turn), { seed: sampling().seed ?? drawnSeed() });
    } catch (error) {
      return Promise.reject(error);
    }
  }

  async #start(turn, request) {
    try {
      turn.request = await request;
    } catch (error) {
      Object.assign(turn, { state: "failed", error: plain(error) });
      store.keep(turn);
      if (turn.conversation === this.id) this.#follow(turn);
      return;
    }
    if (turn.conversation === this.id) this.#last = turn.request;
    await this.#runs.start(turn);
  }

  // Returns the fields of a request, without the model's name, as {field: JSON text}.
  #fields(turn) {
    return {
      ...this.#apiFormat.question(turn, this.#tree.before(turn.parent).filter(isAnswered), this.extras.system),
      ...this.extras.asked,
      ...sampling(),
      ...(showsProbabilities() && this.#apiFormat.probabilities),
      stream: "true",
      stream_options: '{"include_usage":true}',
      timings: "true",
    };
  }

  // Called when a turn of this conversation has changed that this tab runs.
  #follow(turn) {
    if (turn.error) blame(turn.error.param, this.extras.fields);
    const view = this.#views.get(turn.id);
    if (turn.state === "running" && view?.turn === turn) return view.follow();
    this.#tree.put(turn);
    this.#draw();
  }

  // Called when the conversation has been written, by this tab or another one.
  async #see({ conversation, turn: id, isOwn }) {
    if (isOwn && id) return;
    const [known, turn] = [await store.conversation(conversation), id && (await store.turn(id))];
    if (conversation !== this.id) return;
    if (!known) return this.#leave();
    if (!id) return this.#addNew(await store.turnsOf(conversation));
    if (!turn || this.#runs.turn(id)) return;
    if (turn.state === "running") this.#runs.takeUpLater(id);
    this.#tree.put(turn);
    this.#draw();
  }

  // Shows turns that an import has added.
  #addNew(turns) {
    const added = turns.filter(({ id, conversation }) => conversation === this.id && !this.#tree.get(id));
    for (const turn of added) this.#tree.put(turn);
    if (added.length) this.#draw();
  }

  // Called when the conversation has been deleted.
  async #leave() {
    await this.open("");
    this.moved(this);
  }

  // Shows in the waiting answers that `count` requests wait at the server.
  sayWaiting(count) {
    for (const view of this.#views.values()) view.sayWaiting(count);
  }

  #draw() {
    const { path } = this.#tree;
    const shown = new Set(path.map(({ id }) => id));
    for (const [id, view] of this.#views) {
      if (shown.has(id)) continue;
      view.remove();
      this.#views.delete(id);
    }
    for (const [i, turn] of path.entries()) {
      const view = this.#views.get(turn.id) ?? new TurnView(this.log, turn, this.#apiFormat, this.#acts);
      this.#views.set(turn.id, view);
      try {
        view.update(turn, { versions: this.#tree.versions(turn), next: path[i + 1], isBusy: this.#tree.isBusy });
      } catch (error) {
        console.error(error); // a turn that cannot be shown must not keep the next question from being sent
      }
    }
    this.#enable();
  }

  // The actions of a turn's buttons.
  #acts = {
    again: ({ parent, question, files, results }) => this.#ask(parent, { question, files, results }),
    edit: ({ parent, files }, question) => this.#ask(parent, { question, files }),
    give: ({ id }, results) => this.#ask(id, { results }),
    goOn: (turn) => {
      this.#last = turn.request;
      this.#runs.start(Object.assign(turn, { taken: turn.taken + 1 }));
    },
    choose: (turn) => {
      this.#tree.choose(turn);
      this.#draw();
      store.change(this.id, ({ chosen }) => (chosen[turn.parent ?? ""] = turn.id));
      return this.#views.get(turn.id);
    },
  };

  #enable() {
    const busy = this.#tree.isBusy;
    const { send, stop, fresh, curl } = this.buttons;
    const focus = document.activeElement;
    send.disabled = busy || this.composer.isEmpty;
    stop.disabled = !busy;
    fresh.disabled = !this.id;
    curl.disabled = !this.#last && this.composer.isEmpty;
    if (focus.disabled) (busy ? stop : this.composer.input).focus();
    this.log.setAttribute("aria-busy", String(busy));
  }

  // Copies the request that would be sent now or, if nothing is typed, the last request, as a command for the shell.
  #copyCurl() {
    const parent = this.#tree.path.at(-1)?.id ?? null;
    copyBy(this.buttons.curl, async () => {
      if (this.composer.isEmpty || this.#tree.isBusy) return curl(this.#apiFormat.path, this.#last);
      return curl(this.#apiFormat.path, await bodyOf(this.#fields({ ...this.composer.asked, parent })));
    });
  }
}
