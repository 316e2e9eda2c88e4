// An answer that is being generated. A run sends the request of its turn, and adds the output that arrives to the turn.
//
// The server gives the same bytes for the same request and seed. So if a turn has text from before a reload, the same
// request is sent again: the new output is compared with this text, and added to the turn from the end of this text on.
// A server with a store has kept the output, and need not compute it again.
//
// A run whose connection is lost waits until the server is ready again, and does the same.

import { forget, readyAgain, stream } from "./api.js";
import { add, beyond, confirmWhole, nothing, plain } from "./turns.js";

const KEEP_EVERY_MS = 1000;
const MOST_TRIES = 5; // without anything new: a request that is always cut off is not sent forever
const now = () => performance.timeOrigin + performance.now();

export class Run {
  #apiFormat;
  #controller = new AbortController();
  #again; // the output of this stream, until it has as much as the turn
  #behind;
  #tries = 0; // since the last new output
  #kept = 0; // when the turn was last given to `keep`

  // `keep(turn, isProgress)` stores the turn and returns a promise: called at its end, and at most every KEEP_EVERY_MS
  // before, as progress.
  constructor(turn, apiFormat, { keep, drawn }) {
    Object.assign(this, { turn, keep, drawn });
    this.#apiFormat = apiFormat;
  }

  stop() {
    this.#controller.abort();
    if (this.turn.kept) forget(this.turn.id);
  }

  // Runs the turn to its end, and stores it. Never throws: the turn's state says whether it is done, stopped or failed.
  async go() {
    const { turn } = this;
    turn.clock.sent ||= now();
    turn.state = "running";
    turn.error = null;
    try {
      while (!(await this.#isReceived()));
      turn.state = "done";
      turn.request = null;
    } catch (error) {
      turn.state = this.#controller.signal.aborted ? "stopped" : "failed";
      if (turn.state === "failed") turn.error = plain(error);
    }
    turn.lost = null;
    await this.#tell(false);
  }

  // Returns whether the whole answer was received; false if the connection was lost, and the server is ready again.
  async #isReceived() {
    const { turn } = this;
    const { signal } = this.#controller;
    try {
      await this.#receive();
      return true;
    } catch (error) {
      this.#tries += 1;
      if (signal.aborted || !error.isLost || this.#tries === MOST_TRIES) throw error;
      turn.lost = error.message;
    }
    this.#tell(true);
    await readyAgain(signal);
    turn.taken += 1;
    turn.repeated = null;
    return false;
  }

  async #receive() {
    const { turn } = this;
    this.#again = nothing();
    this.#behind = turn.clock.first > 0;
    const decoder = new TextDecoder();
    const asked = { id: turn.id, again: turn.kept && turn.taken > 0 };
    for await (const chunk of stream(this.#apiFormat.path, turn.request, this.#controller.signal, asked)) {
      if (turn.lost || turn.kept !== chunk.kept) {
        Object.assign(turn, { lost: null, kept: chunk.kept });
        this.#tell(true);
      }
      const choice = chunk.choices?.[0];
      if (choice) this.#take(this.#piece(choice, decoder));
      if (choice?.finish_reason) Object.assign(turn.end, { finish: choice.finish_reason, stop: choice.stop_reason, seed: chunk.seed });
      if (chunk.usage) Object.assign(turn.end, { usage: chunk.usage, timings: chunk.timings });
    }
    if (this.#behind) confirmWhole(this.#again, turn);
  }

  #piece(choice, decoder) {
    const said = this.#apiFormat.said(choice);
    const tokens = this.#apiFormat.tokens(choice, decoder).map((token) => ({ ...token, ...(said.thought && { thinks: true }) }));
    const bare = said.thought || said.text;
    if (this.turn.scored && bare && !tokens.length) tokens.push({ text: bare, ...(said.thought && { thinks: true }) });
    return { ...said, tokens };
  }

  #take(piece) {
    if (!piece.thought && !piece.text && !piece.calls.length && !piece.tokens.length) return;
    const { turn } = this;
    if (this.#behind) {
      add(this.#again, piece);
      piece = beyond(this.#again, turn);
      turn.repeated = piece ? null : this.#again.text.length + this.#again.thought.length;
      if (piece === null) return this.drawn(turn);
      this.#behind = false;
    }
    this.#tries = 0;
    turn.clock.last = now();
    turn.clock.first ||= turn.clock.last;
    if (piece.thought) turn.clock.thought = turn.clock.last;
    add(turn, piece);
    this.#tell(true);
  }

  #tell(isProgress) {
    this.drawn(this.turn);
    if (isProgress && now() - this.#kept < KEEP_EVERY_MS) return undefined;
    this.#kept = now();
    return this.keep(this.turn, isProgress);
  }
}
