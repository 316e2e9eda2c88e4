// A turn of a conversation: a question, the request that was sent, and the answer as far as it has arrived. Turns are
// plain objects, stored as they are. They form a tree: editing a question, or asking it again, adds a child to its
// parent.
//
// id, conversation, parent (the turn before it, or null), kind (the name in api_formats.js), created (in ms)
// question (null if it has results), files: [{name, size, text, picture}], results (messages of tools, or null)
// request (the body as JSON text, until the answer is done), scored (whether the request asked for probabilities)
// state: "running", "done", "stopped" or "failed"; error: {message, status, param, retryAfter} or null
// thought (reasoning), text, calls (as in a message), tokens (see api_formats.js; tokens of the thought have `thinks`)
// repeated: while the answer is taken up again, how many characters the server has sent again, else null
// lost: while the connection is lost, what has happened, else null or absent
// kept: whether the server keeps the answer under the turn's id, see api.js
// clock: {sent, first, last, thought} in ms since 1970, 0 if not yet; taken: how often the answer was taken up again
// end: {finish, stop, seed, usage, timings}

import { Failure } from "./api.js";

const OTHER_TEXT =
  "the server now gives another text for this request: its model or its version has changed. The text above is what had arrived before";

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

// Returns a random seed as digits. With an explicit seed, the same request gives the same bytes again.
export const drawnSeed = () => String(crypto.getRandomValues(new BigUint64Array(1))[0]);

// Returns an error in the form that a turn stores.
export function plain(error) {
  if (!(error instanceof Failure)) console.error(error);
  const { message, status = 0, param = null, retryAfter = null } = error;
  return { message, status, param, retryAfter };
}

export const nothing = () => ({ thought: "", text: "", calls: [], tokens: [] });

export function newTurn(conversation, kind, parent, { question = null, files = [], results = null }) {
  return {
    id: newId(), conversation, parent, kind, created: Date.now(), question, files, results, request: null, scored: false,
    state: "running", error: null, ...nothing(), clock: { sent: 0, first: 0, last: 0, thought: 0 }, taken: 0, repeated: null, lost: null, kept: false, end: {},
  };
}

// Whether later questions send this turn as a part of the conversation.
export const isAnswered = ({ state, text }) => state === "done" || (state === "stopped" && text !== "");

export const waitsForResults = ({ state, end, calls }) => state === "done" && end.finish === "tool_calls" && calls.length > 0;

// Adds a piece of a stream, {thought, text, calls, tokens}, to the output that has arrived.
export function add(arrived, { thought, text, calls, tokens }) {
  arrived.thought += thought;
  arrived.text += text;
  for (const token of tokens) arrived.tokens.push(token);
  for (const { index, id, function: piece } of calls) {
    arrived.calls[index] ??= { id, type: "function", function: { name: piece.name, arguments: "" } };
    arrived.calls[index].function.arguments += piece.arguments ?? "";
  }
}

const written = ({ calls }) => calls.map((call) => call.function.name + call.function.arguments);
const strings = (arrived) => [arrived.thought, arrived.text, ...written(arrived)];

// Returns the piece of `again` that `shown` lacks; null while `again` has less. Throws a Failure if the two differ.
export function beyond(again, shown) {
  const [now, before] = [strings(again), strings(shown)];
  for (const [i, text] of now.entries()) {
    const other = before[i] ?? "";
    if (!text.startsWith(other) && !other.startsWith(text)) throw new Failure(OTHER_TEXT);
  }
  const isLess = before.some((text, i) => text.length > (now[i] ?? "").length) || again.tokens.length < shown.tokens.length;
  return isLess ? null : rest(again, shown);
}

function rest(again, shown) {
  const calls = again.calls.map(({ id, function: call }, index) => {
    const known = shown.calls[index]?.function.arguments.length ?? 0;
    return { index, id, function: { name: call.name, arguments: call.arguments.slice(known) } };
  });
  return {
    thought: again.thought.slice(shown.thought.length),
    text: again.text.slice(shown.text.length),
    calls,
    tokens: again.tokens.slice(shown.tokens.length),
  };
}

// Throws a Failure if the output `again` of a complete stream is shorter than the text that was shown.
export function confirmWhole(again, shown) {
  if (beyond(again, shown) === null) throw new Failure(OTHER_TEXT);
}
