// An answer that is being generated. A run sends the request of its turn and adds to the turn what arrives.
//
// The server gives the same bytes for the same request and seed. A turn with text from before a reload is therefore sent
// again as it was: what arrives is compared with the text that is there, and added from its end on.

import { stream } from "./api.js";
import { add, beyond, confirmWhole, nothing, plain } from "./turns.js";

const KEEP_EVERY_MS = 1000;
const now = () => performance.timeOrigin + performance.now();

export class Run {
  #apiFormat;
  #controller = new AbortController();
  #again = nothing(); // what this stream has brought, until it has as much as the turn
  #behind;
  #kept = 0; // when the turn was kept last

  // `keep(turn, isProgress)` is called when the turn has changed for good, and now and then before.
  constructor(turn, apiFormat, { keep, drawn }) {
    Object.assign(this, { turn, keep, drawn });
    this.#apiFormat = apiFormat;
    this.#behind = turn.clock.first > 0;
  }

  stop() {
    this.#controller.abort();
  }

  // Never throws: the turn's state says whether it is done, stopped or failed.
  async go() {
    const { turn } = this;
    turn.clock.sent ||= now();
    turn.state = "running";
    turn.error = null;
    try {
      await this.#receive();
      turn.state = "done";
      turn.request = null;
    } catch (error) {
      turn.state = this.#controller.signal.aborted ? "stopped" : "failed";
      if (turn.state === "failed") turn.error = plain(error);
    }
    this.#tell(false);
  }

  async #receive() {
    const { turn } = this;
    const decoder = new TextDecoder();
    for await (const chunk of stream(this.#apiFormat.path, turn.request, this.#controller.signal)) {
      const choice = chunk.choices[0];
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
    turn.clock.last = now();
    turn.clock.first ||= turn.clock.last;
    if (piece.thought) turn.clock.thought = turn.clock.last;
    add(turn, piece);
    this.#tell(true);
  }

  #tell(isProgress) {
    this.drawn(this.turn);
    if (isProgress && now() - this.#kept < KEEP_EVERY_MS) return;
    this.#kept = now();
    this.keep(this.turn, isProgress);
  }
}
