// Requests /ready and /stats each second while the page is visible: the state in the header, and the charts.

import { access, apiKey, get, readiness } from "./api.js";
import { Chart, WINDOW_MS } from "./chart.js";
import { Events } from "./events.js";
import { milliseconds } from "./timing.js";

const EVERY_MS = 1000;
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const count = (value) => compact.format(value >= 100 ? Math.round(value) : value);
const milli = (seconds) => (seconds ? milliseconds(seconds * 1000) : "0");
const share = (pages, part) => (pages.total ? (100 * pages[part]) / pages.total : 0);

const CHARTS = [
  {
    title: "Tokens / s", lines: ["generated", "prompt"], least: 10, write: count,
    read: ({ throughput }) => [throughput.generation, throughput.prompt],
  },
  {
    title: "Requests", lines: ["running", "waiting"], least: 2, write: count,
    read: ({ running, waiting }) => [running, waiting],
  },
  {
    title: "K/V cache", lines: ["in use", "reusable"], most: 100, write: (value) => `${count(value)} %`,
    read: ({ pages }) => [share(pages, "owned"), share(pages, "cached")],
  },
  {
    title: "TTFT (first token)", lines: ["p50", "p99"], least: 0.01, write: milli,
    read: ({ latency }) => [latency.ttft.p50, latency.ttft.p99],
  },
  {
    title: "ITL (next tokens)", lines: ["p50", "p99"], least: 0.01, write: milli,
    read: ({ latency }) => [latency.itl.p50, latency.itl.p99],
  },
];

const state = document.getElementById("state");
const facts = document.getElementById("facts");
facts.title = "Ready for: since this page first saw it";

export class Live {
  #charts = CHARTS.map((spec) => new Chart(spec, document.getElementById("charts")));
  #events = new Events(document.getElementById("events"));
  #samples = []; // {at, stats or null}
  #since = 0; // when the server last became ready, in ms; 0 while it is not ready
  #shut = false; // /stats has refused the key

  // `onReady` is called each time the server becomes ready, and `onStats` with each answer of /stats.
  constructor(onReady, onStats) {
    Object.assign(this, { onReady, onStats });
    access.addEventListener("changed", () => {
      this.#shut = false;
      this.#ask();
    });
    this.#tick();
  }

  async #tick() {
    if (!document.hidden) await this.#ask();
    setTimeout(() => this.#tick(), EVERY_MS);
  }

  async #ask() {
    const key = apiKey.get();
    const [ready, stats] = await Promise.allSettled([readiness(), this.#shut ? null : get("stats")]);
    if (key !== apiKey.get()) return; // the change of the key has asked again
    const now = Date.now();
    if (stats.reason) this.#shut = stats.reason.status === 401;
    this.#samples.push({ at: now, stats: stats.value ?? null });
    this.#samples = this.#samples.filter((sample) => now - sample.at < WINDOW_MS);
    this.#sayState(ready.value ?? { ready: false, reason: ready.reason.message }, now);
    if (stats.value) this.#events.see(stats.value.workers, now);
    if (stats.value) this.onStats(stats.value);
    this.#sayFacts(stats.value, now);
    this.draw();
  }

  #sayState({ ready, reason }, now) {
    const [fresh, lost] = [ready && !this.#since, !ready && this.#since > 0];
    if (!ready) this.#shut = false; // the server may come back without API keys
    this.#since = ready ? this.#since || now : 0;
    const said = ready ? "ready" : `not ready: ${reason}`;
    if (state.textContent !== said) state.textContent = said; // otherwise a screen reader would repeat the state each second
    state.dataset.ready = document.body.dataset.ready = ready;
    if (lost) this.#events.add(said, now);
    if (fresh) this.#events.add("ready", now);
    if (fresh) this.onReady();
  }

  #sayFacts(stats, now) {
    if (!stats) return (facts.textContent = this.#shut ? "the statistics need an API key" : "");
    const { worker, workers } = stats;
    const many = workers.length > 1 ? [`${workers.filter(({ ready }) => ready).length} of ${workers.length} workers ready`] : [];
    const up = this.#since ? [`ready for ${duration(now - this.#since)}`] : [];
    const epoch = workers.length === 1 && worker.epoch && `epoch ${worker.epoch}`;
    const parts = [worker.model, worker.device, worker.dtype, ...many, epoch, ...up];
    facts.textContent = parts.filter(Boolean).join(" · ");
  }

  draw() {
    const now = this.#samples.at(-1)?.at ?? Date.now();
    this.#charts.forEach((chart) => {
      chart.draw(this.#samples.map(({ at, stats }) => ({ at, values: stats && chart.spec.read(stats) })), now, this.#events.marks);
    });
  }
}

function duration(ms) {
  const seconds = Math.round(ms / 1000);
  if (seconds < 100) return `${seconds} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}
