// The turns of one conversation as a tree, and the path through it that the page shows.

export class Tree {
  #turns = new Map(); // by id
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

  // All turns after the same turn, oldest first.
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

  // From the first turn to the last; where nothing is chosen, the newest version.
  get path() {
    const path = [];
    for (let parent = null; ; parent = path.at(-1).id) {
      const versions = this.#after(parent);
      if (!versions.length) return path;
      path.push(versions.find(({ id }) => id === this.#chosen[parent ?? ""]) ?? versions.at(-1));
    }
  }

  // The turns before a turn whose parent is given, oldest first.
  before(parent) {
    const turns = [];
    for (let turn = this.get(parent); turn; turn = this.get(turn.parent)) turns.unshift(turn);
    return turns;
  }
}
