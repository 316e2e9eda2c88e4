// The answers that this tab generates, also in conversations that it does not show at the moment.
//
// The tab that runs a turn holds a lock for the turn, which the browser releases when the tab is closed or reloaded.
// The tab that then gets the lock takes the answer up again. Browsers have locks on https and localhost only; elsewhere
// two tabs may run the same turn, which gives the same text twice.

import * as apiFormats from "./api_formats.js";
import { Run } from "./run.js";
import * as store from "./store.js";

const exclusively = (turn, work) => (navigator.locks ? navigator.locks.request(`turn ${turn.id}`, work) : work());

// A page that is being closed cannot write to the store, but it can write to the tab's own storage, which a reload
// keeps.
const LEFT = "left ";

function leave(turn) {
  try {
    sessionStorage.setItem(LEFT + turn.id, JSON.stringify(turn));
  } catch {
    // The turn is too large for the tab's storage. The store has it as it was at most a second before.
  }
}

export class Runs extends EventTarget {
  #running = new Map(); // id of a turn → its Run
  #awaited = new Set(); // ids of turns whose lock this tab waits for

  constructor() {
    super();
    addEventListener("pagehide", () => this.#running.forEach(({ turn }) => leave(turn)));
    store.changes.addEventListener("stop", ({ detail }) => this.#stopOwn(detail.conversation));
  }

  // Returns the turn with this id while this tab runs it, until the store has its end; else undefined. So whoever has
  // read the turn from the store before its end finds the newer one here.
  turn(id) {
    return this.#running.get(id)?.turn;
  }

  // Runs a turn that has its request. Dispatches "draw" with the turn whenever the turn has changed; resolves at its
  // end.
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

  // Stores the turns that the page left in the tab's storage before a reload.
  async returned() {
    for (const key of Object.keys(sessionStorage).filter((name) => name.startsWith(LEFT))) {
      await store.extend(JSON.parse(sessionStorage.getItem(key)));
      sessionStorage.removeItem(key);
    }
  }

  // Takes up the unfinished answers of all conversations: at once or, if another tab runs them, when that tab is
  // closed.
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
