// Exports and imports conversations as one JSON file. A file is read and checked as a whole before anything is stored.

import { Failure } from "./api.js";
import * as apiFormats from "./api_formats.js";
import { isPicture } from "./files.js";
import { boolean, id, mapOf, maybe, need, number, oneOf, pair, string, taken } from "./shapes.js";

const FORMAT = "sluice-conversations";
const VERSION = 1;

const CACHED = { cached_tokens: maybe(number) };
const USAGE = { prompt_tokens: maybe(number), completion_tokens: maybe(number), prompt_tokens_details: maybe(CACHED) };
const TIMINGS = { queue_ms: maybe(number), prefill_ms: maybe(number), decode_ms: maybe(number), draft_tokens: maybe(number), accepted_draft_tokens: maybe(number) };
const TURN = {
  id,
  parent: maybe(id),
  created: number,
  question: maybe(string),
  files: [{ name: string, size: number, text: string, picture: maybe(picture) }],
  results: maybe([{ role: oneOf(["tool"]), tool_call_id: string, content: string }]),
  request: maybe(string),
  scored: boolean,
  state: oneOf(["running", "done", "stopped", "failed"]),
  error: maybe({ message: string, status: number, param: maybe(string), retryAfter: maybe(string) }),
  thought: string,
  text: string,
  calls: [{ id: string, type: oneOf(["function"]), function: { name: string, arguments: string } }],
  tokens: [{ text: string, name: maybe(string), logprob: maybe(number), top: maybe([pair(string, number)]), thinks: maybe(boolean) }],
  clock: { sent: number, first: number, last: number, thought: number },
  taken: number,
  kept: maybe(boolean),
  end: { finish: maybe(string), stop: maybe(stop), seed: maybe(string), usage: maybe(USAGE), timings: maybe(TIMINGS) },
};
const CONVERSATION = {
  id,
  kind: oneOf(Object.keys(apiFormats)),
  title: string,
  created: number,
  changed: number,
  chosen: mapOf(string),
  extras: mapOf(string),
  turns: [TURN],
};

function picture(value, where) {
  need(isPicture(string(value, where)), `\`${where}\` is not the data: URL of a picture`);
  return value;
}

// A stop string, or the id of a stop token.
function stop(value, where) {
  return typeof value === "number" ? value : string(value, where);
}

export function fileOf({ conversations, turns }) {
  const whole = conversations.map((one) => ({ ...one, turns: turns.filter(({ conversation }) => conversation === one.id).map(bare) }));
  return JSON.stringify({ format: FORMAT, version: VERSION, exported: new Date().toISOString(), conversations: whole }, null, 1);
}

// Returns a turn without the fields that its conversation has, and without what is temporary.
const bare = ({ conversation, kind, repeated, lost, ...turn }) => turn;

// Returns {conversations, turns} of a file's text. Throws a Failure that says what is wrong, and where.
export function contentOf(text) {
  const file = parsed(text);
  need(file?.format === FORMAT, `it has no "format": "${FORMAT}"`);
  need(file.version === VERSION, `its version is ${JSON.stringify(file.version)}, and this page reads version ${VERSION}`);
  const found = taken(file, { conversations: [CONVERSATION] }, "").conversations;
  for (const [i, { turns }] of found.entries()) checkTree(turns, `conversations[${i}]`);
  checkIds(found, "conversations");
  const all = found.flatMap(({ id, kind, turns }) => turns.map((turn) => atRest({ ...turn, conversation: id, kind })));
  checkIds(all, "turns");
  return { conversations: found.map(({ turns, ...conversation }) => conversation), turns: all };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Failure(`it is not JSON: ${error.message}`);
  }
}

function checkTree(turns, where) {
  const parents = new Map(turns.map(({ id, parent }) => [id, parent]));
  for (const [i, turn] of turns.entries()) {
    const at = `${where}.turns[${i}]`;
    need((turn.question === null) !== (turn.results === null), `\`${at}\` has not either a question or results`);
    need(turn.state !== "failed" || turn.error, `\`${at}\` has failed without an error`);
    const passed = new Set([turn.id]);
    for (let above = turn.parent; above !== null; above = parents.get(above)) {
      need(parents.has(above), `\`${at}.parent\` leads to no turn of its conversation`);
      need(!passed.has(above), `\`${at}.parent\` leads round in a circle`);
      passed.add(above);
    }
  }
}

function checkIds(items, name) {
  need(new Set(items.map(({ id }) => id)).size === items.length, `two of its ${name} have the same id`);
}

// An answer that was running when the file was written is stopped here.
const atRest = (turn) => ({ ...turn, repeated: null, lost: null, state: turn.state === "running" ? "stopped" : turn.state });
