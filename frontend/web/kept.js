// The answers that the server keeps for this browser's API key, as a list. One of them is opened as a conversation of
// this browser, which reads the answer from the server, and goes on with it if it is still running.

import { access, apiKey, get } from "./api.js";
import { newId, newTurn } from "./turns.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const [section, list, said] = ["kept", "kept-list", "kept-said"].map($);
const KINDS = { "/v1/chat/completions": "chat", "/v1/completions": "completion" };
const TITLE = 60; // letters of a title

// Without a key, the server lists nothing: all its clients would see the answers of all.
function show() {
  section.hidden = !apiKey.get();
  section.open = false;
  list.replaceChildren();
}

async function draw() {
  said.textContent = "";
  try {
    const rows = (await get("v1/streams")).data.filter(({ path }) => path in KINDS);
    list.replaceChildren(...rows.map(item));
    said.textContent = rows.length ? "" : "The server keeps no answer for this key.";
  } catch ({ message }) {
    list.replaceChildren();
    said.textContent = `${message}.`;
  }
}

const titleOf = (question) => question.trim().replace(/\s+/g, " ").slice(0, TITLE) || "Untitled";

function item(row) {
  const line = document.createElement("li");
  const made = Object.assign(document.createElement("button"), { type: "button", className: "quiet", textContent: titleOf(row.question) });
  const when = new Date(row.created_at * 1000).toLocaleString();
  const status = row.status === "in_progress" || row.status === "queued" ? "running" : row.status;
  made.addEventListener("click", () => open(row));
  line.append(made, Object.assign(document.createElement("span"), { className: "status", textContent: `${status}, ${when}` }));
  return line;
}

// Opens the conversation that has the answer; without one in this browser, makes a conversation of it.
async function open(row) {
  const known = await store.turn(row.id);
  const id = known?.conversation ?? newId();
  if (!known) {
    const [kind, created] = [KINDS[row.path], row.created_at * 1000];
    const turn = { ...newTurn(id, kind, null, { question: row.question }), id: row.id, created, kept: true };
    await store.create({ id, kind, title: titleOf(row.question), created, changed: Date.now(), chosen: {}, extras: {} });
    await store.keep(turn);
  }
  section.dispatchEvent(new CustomEvent("chosen", { detail: { turn: row.id } }));
  location.hash = id;
}

access.addEventListener("changed", show);
section.addEventListener("toggle", () => section.open && draw());
show();
