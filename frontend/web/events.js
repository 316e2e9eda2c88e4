// Events of the server since the page was opened: a short list under the charts, and marks in the charts.

const MOST = 6;

export class Events {
  marks = []; // when a worker restarted, in ms
  #list;
  #epochs = new Map(); // address of a worker → its latest epoch

  constructor(list) {
    this.#list = list;
  }

  // Adds an event for each worker that was restarted, which its new epoch shows. `workers` is the list in /stats.
  see(workers, now) {
    for (const { address, epoch, pid } of workers) {
      if (!epoch) continue; // the worker is not connected at the moment
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
