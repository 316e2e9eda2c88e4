// The answers that this tab generates, also those of conversations that it does not show at the moment.
//
// One tab runs a turn: it holds a lock of that name, which the browser releases when the tab is closed or reloaded. The
// tab that then gets the lock takes the answer up. Browsers have locks on https and localhost only; elsewhere two tabs
// may run the same turn, which gives the same text twice.

import * as apiFormats from "./api_formats.js";
import { Run } from "./run.js";
import * as store from "./store.js";

const exclusively = (turn, work) => (navigator.locks ? navigator.locks.request(`turn ${turn.id}`, work) : work());

// A page that is closed can no longer write to the store, but to the tab's own storage, which a reload does not clear.
const LEFT = "left ";

function leave(turn) {
  try {
    sessionStorage.setItem(LEFT + turn.id, JSON.stringify(turn));
  } catch {
    // too large: what the store has is at most a second older
  }
}

export class Runs extends EventTarget {
  #running = new Map(); // by the turn's id
  #awaited = new Set(); // ids of turns whose lock this tab waits for

  constructor() {
    super();
    addEventListener("pagehide", () => this.#running.forEach(({ turn }) => leave(turn)));
    store.changes.addEventListener("stop", ({ detail }) => this.#stopOwn(detail.conversation));
  }

  // The turn as this tab has it while it runs, else undefined.
  turn(id) {
    return this.#running.get(id)?.turn;
  }

  // Runs a turn whose request is set; "draw" is dispatched with the turn whenever it has more. Resolves at its end.
  start(turn) {
    return exclusively(turn, () => this.#run(turn));
  }

  async #run(turn) {
    const drawn = (changed) => this.dispatchEvent(new CustomEvent("draw", { detail: changed }));
    const run = new Run(turn, apiFormats[turn.kind], { keep: store.keep, drawn });
    this.#running.set(turn.id, run);
    turn.state = "running";
    await store.keep(turn);
    drawn(turn);
    await run.go();
    this.#running.delete(turn.id);
    drawn(turn);
  }

  // Brings back what the page had shown before a reload.
  async returned() {
    for (const key of Object.keys(sessionStorage).filter((name) => name.startsWith(LEFT))) {
      await store.extend(JSON.parse(sessionStorage.getItem(key)));
      sessionStorage.removeItem(key);
    }
  }

  // Takes up answers that a reload or a closed tab has left, at once or when the tab that runs them is closed.
  async takeUp() {
    for (const { id } of await store.running()) this.takeUpLater(id);
  }

  takeUpLater(id) {
    if (this.#running.has(id) || this.#awaited.has(id)) return;
    this.#awaited.add(id);
    exclusively({ id }, async () => {
      this.#awaited.delete(id);
      const turn = await store.turn(id);
      if (turn?.state !== "running" || this.#running.has(id)) return;
      turn.taken += 1;
      await this.#run(turn);
    });
  }

  #stopOwn(conversation) {
    for (const run of this.#running.values()) if (run.turn.conversation === conversation) run.stop();
  }

  // Stops the answers of a conversation, in whichever tab they run.
  stop(conversation) {
    this.#stopOwn(conversation);
    store.askToStop(conversation);
  }
}
