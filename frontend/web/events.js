// What happened to the server while the page was open: a short list under the charts, and marks in them.

const MOST = 6;

export class Events {
  marks = []; // when a worker restarted, in ms
  #list;
  #epochs = new Map(); // by the worker's address

  constructor(list) {
    this.#list = list;
  }

  // `workers` as in /stats. A worker with another epoch than before is another process.
  see(workers, now) {
    for (const { address, epoch, pid } of workers) {
      if (!epoch) continue; // not connected at the moment
      const before = this.#epochs.get(address) ?? epoch;
      this.#epochs.set(address, epoch);
      if (epoch === before) continue;
      this.marks.push(now);
      this.add(`worker${workers.length > 1 ? ` ${address}` : ""} restarted: epoch ${epoch}, pid ${pid}`, now);
    }
  }

  add(text, now) {
    const item = document.createElement("li");
    const time = document.createElement("time");
    time.textContent = new Date(now).toLocaleTimeString("en-GB");
    item.append(time, ` ${text}`);
    this.#list.prepend(item);
    this.#list.children[MOST]?.remove();
  }
}
