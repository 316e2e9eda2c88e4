// Conversations and their turns in the browser's IndexedDB, which all tabs share. A turn is written by the tab that
// runs it, and a conversation is changed within one transaction, so no tab undoes what another tab has written.
//
// A conversation is {id, kind, title, created, changed, chosen (see tree.js), extras: {field: text}}.

const NAME = "sluice";
const channel = new BroadcastChannel(NAME);

// Dispatches "change" with {conversation, turn, isProgress, isOwn} after each write of any tab; `isOwn` says whether it
// was this tab's. Dispatches "stop" with {conversation} when a tab stops its answers, and "failure" with an Error.
export const changes = new EventTarget();
const tell = (name, detail) => changes.dispatchEvent(new CustomEvent(name, { detail }));
channel.addEventListener("message", ({ data: { name, detail } }) => tell(name, { ...detail, isOwn: false }));

function announce(name, detail) {
  channel.postMessage({ name, detail });
  tell(name, { ...detail, isOwn: true });
}

const value = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

function build({ target: { result: database } }) {
  database.createObjectStore("conversations", { keyPath: "id" });
  const turns = database.createObjectStore("turns", { keyPath: "id" });
  turns.createIndex("conversation", "conversation");
  turns.createIndex("state", "state");
}

let opened = null;

async function database() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = build;
  const found = await value(request);
  found.onversionchange = () => found.close();
  return found;
}

// Runs `work(conversations, turns)` in one transaction. Resolves with the result of `work` when everything is written.
async function transaction(mode, work) {
  const parts = (await (opened ??= database())).transaction(["conversations", "turns"], mode);
  const written = new Promise((resolve, reject) => {
    parts.oncomplete = resolve;
    parts.onabort = () => reject(parts.error ?? new Error("the browser refused to write"));
  });
  written.catch(() => {});
  const result = await work(parts.objectStore("conversations"), parts.objectStore("turns"));
  await written;
  return result;
}

const read = (work) => transaction("readonly", work);

// Runs `work` in a transaction that writes. If it fails, dispatches "failure" and resolves with undefined; nothing
// throws.
async function write(work, ...changed) {
  try {
    const result = await transaction("readwrite", work);
    for (const change of changed) announce("change", change);
    return result;
  } catch (error) {
    tell("failure", error);
    return undefined;
  }
}

const ofOne = (turns, id) => value(turns.index("conversation").getAll(id));

export const conversation = (id) => read((conversations) => value(conversations.get(id)));
export const turn = (id) => read((_, turns) => value(turns.get(id)));
export const turnsOf = (id) => read((_, turns) => ofOne(turns, id));
export const running = () => read((_, turns) => value(turns.index("state").getAll("running")));

// Returns all conversations, the last changed one first.
export async function conversations() {
  const all = await read((found) => value(found.getAll()));
  return all.sort((a, b) => b.changed - a.changed);
}

export const everything = () =>
  read(async (conversations, turns) => ({ conversations: await value(conversations.getAll()), turns: await value(turns.getAll()) }));

export const create = (made) => write((conversations) => void conversations.put(made), { conversation: made.id });

// Changes a conversation by `edit(conversation)`, which gets it as it is now, with the changes of other tabs.
export const change = (id, edit, isProgress = false) =>
  write(async (conversations) => {
    const current = await value(conversations.get(id));
    if (!current) return;
    edit(current);
    conversations.put(current);
  }, { conversation: id, isProgress });

// Writes a turn, unless its conversation has been deleted.
export const keep = (turn, isProgress = false) =>
  write(async (conversations, turns) => {
    if (await value(conversations.getKey(turn.conversation))) turns.put(turn);
  }, { conversation: turn.conversation, turn: turn.id, isProgress });

// Writes a turn that is still running, unless the store has at least as much of its text.
export const extend = (turn) =>
  write(async (_, turns) => {
    const known = await value(turns.get(turn.id));
    const size = ({ thought, text, tokens }) => thought.length + text.length + tokens.length;
    if (known?.state === "running" && size(known) < size(turn)) turns.put(turn);
  });

// Removes a conversation with its turns. Returns both in the form that `add` takes.
export const remove = (id) =>
  write(async (conversations, turns) => {
    const removed = { conversations: [await value(conversations.get(id))], turns: await ofOne(turns, id) };
    conversations.delete(id);
    for (const turn of removed.turns) turns.delete(turn.id);
    return removed;
  }, { conversation: id });

// Adds the conversations and turns that are not there yet: all of them, or none after an error. Returns how many
// conversations have changed.
export const add = (added) =>
  write(async (conversations, turns) => {
    const changed = new Set();
    for (const [store, items] of [[conversations, added.conversations], [turns, added.turns]]) {
      for (const item of items) {
        if (await value(store.getKey(item.id))) continue;
        store.put(item);
        changed.add(item.conversation ?? item.id);
      }
    }
    return changed.size;
  }, ...added.conversations.map(({ id }) => ({ conversation: id })));

export const askToStop = (id) => announce("stop", { conversation: id });
