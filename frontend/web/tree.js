// The turns of one conversation as a tree, and the path through it that the page shows.

export class Tree {
  #turns = new Map(); // id → turn
  #chosen; // {the parent's id, or "" for the beginning: the id of the version that is shown}

  constructor(turns = [], chosen = {}) {
    for (const turn of turns) this.put(turn);
    this.#chosen = { ...chosen };
  }

  get(id) {
    return this.#turns.get(id);
  }

  put(turn) {
    this.#turns.set(turn.id, turn);
  }

  get all() {
    return [...this.#turns.values()];
  }

  get isBusy() {
    return this.all.some(({ state }) => state === "running");
  }

  // Returns all turns whose parent is `parent`, oldest first.
  #after(parent) {
    return this.all.filter((turn) => (turn.parent ?? null) === parent).sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
  }

  versions(turn) {
    return this.#after(turn.parent);
  }

  choose(turn) {
    this.#chosen[turn.parent ?? ""] = turn.id;
  }

  get chosen() {
    return { ...this.#chosen };
  }

  // The turns on the page, from the first to the last. Of several versions, the chosen one is shown, else the newest.
  get path() {
    const path = [];
    for (let parent = null; ; parent = path.at(-1).id) {
      const versions = this.#after(parent);
      if (!versions.length) return path;
      path.push(versions.find(({ id }) => id === this.#chosen[parent ?? ""]) ?? versions.at(-1));
    }
  }

  // Returns the turns up to the turn with the id `parent`, oldest first.
  before(parent) {
    const turns = [];
    for (let turn = this.get(parent); turn; turn = this.get(turn.parent)) turns.unshift(turn);
    return turns;
  }
}
