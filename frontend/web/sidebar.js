// The list of conversations. They are opened by a link, found by a word, renamed, deleted (with undo), exported,
// imported.

import { forget } from "./api.js";
import { copyOf } from "./calls.js";
import * as store from "./store.js";
import { contentOf, fileOf } from "./transfer.js";

const $ = (id) => document.getElementById(id);
const UNDO_MS = 15000;
const AROUND = 30; // letters of context before a word that was found

export const current = () => location.hash.slice(1);

// Returns the conversations that contain `word`, as a Map: id → the text around the word; "" if the title contains it.
async function search(word) {
  const { conversations, turns } = await store.everything();
  const needle = word.toLowerCase();
  const found = new Map(conversations.filter(({ title }) => title.toLowerCase().includes(needle)).map(({ id }) => [id, ""]));
  for (const { conversation, question, text, thought, files } of turns) {
    if (found.has(conversation)) continue;
    const texts = [question ?? "", text, thought, ...files.flatMap(({ name, text: content }) => [name, content])];
    const hit = texts.find((each) => each.toLowerCase().includes(needle));
    if (hit !== undefined) found.set(conversation, excerpt(hit, hit.toLowerCase().indexOf(needle)));
  }
  return found;
}

function excerpt(text, at) {
  const start = Math.max(0, at - AROUND);
  return (start ? "…" : "") + text.slice(start, start + 3 * AROUND).replace(/\s+/g, " ");
}

export class Sidebar {
  #drawing = Promise.resolve();
  #undo = null; // the conversation that was deleted last, for `store.add`
  #timer = 0;

  constructor() {
    $("search").addEventListener("input", () => this.draw());
    $("list").addEventListener("click", ({ target }) => this.#click(target));
    $("export").addEventListener("click", () => this.#export());
    $("import").addEventListener("click", () => $("imported").click());
    $("imported").addEventListener("change", () => this.#import());
    $("undo").addEventListener("click", () => this.#restore());
    store.changes.addEventListener("change", ({ detail }) => !detail.isProgress && this.draw());
    store.changes.addEventListener("failure", ({ detail }) => this.#say(`This browser could not keep the conversation: ${detail.message}.`));
  }

  draw() {
    this.#drawing = this.#drawing.then(() => this.#draw()).catch((error) => this.#say(`The conversations cannot be read: ${error.message}.`));
    return this.#drawing;
  }

  async #draw() {
    const word = $("search").value.trim();
    const [all, running] = [await store.conversations(), await store.running()];
    const found = word ? await search(word) : null;
    const shown = found ? all.filter(({ id }) => found.has(id)) : all;
    const busy = new Set(running.map(({ conversation }) => conversation));
    const focus = document.activeElement.closest("#list li");
    if (focus?.querySelector("input")) return; // a name is being typed; `#rename` draws the list afterwards
    const [id, name] = [focus?.dataset.id, document.activeElement.className];
    this.#list(shown, (item, one) => this.#fill(item, one, found?.get(one.id), busy.has(one.id)));
    $("found").textContent = found ? `${shown.length} of ${all.length} conversations` : "";
    document.title = [all.find(({ id }) => id === current())?.title, "Sluice playground"].filter(Boolean).join(" – ");
    $("export").disabled = !all.length;
    $("list").querySelector(`[data-id="${id}"] .${name || "title"}`)?.focus();
  }

  // Lists the conversations. An item that is listed already stays in the page: a link that is replaced between the press
  // of the mouse and its release is not followed.
  #list(shown, fill) {
    const [list, ids] = [$("list"), new Set(shown.map(({ id }) => id))];
    for (const item of [...list.children]) if (!ids.has(item.dataset.id)) item.remove();
    for (const [i, one] of shown.entries()) {
      const item = list.querySelector(`[data-id="${one.id}"]`) ?? copyOf("item").querySelector("li");
      if (list.children[i] !== item) list.insertBefore(item, list.children[i] ?? null);
      fill(item, one);
    }
  }

  #fill(item, { id, title }, place, isRunning) {
    const [link, part] = [item.querySelector("a"), (name) => item.querySelector(`.${name}`)];
    item.dataset.id = id;
    link.href = `#${id}`;
    if (link.textContent !== title) link.textContent = title;
    link.title = title;
    if (id === current()) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    part("rename").setAttribute("aria-label", `Rename ${title}`);
    part("delete").setAttribute("aria-label", `Delete ${title}`);
    part("running").hidden = !isRunning;
    part("place").textContent = place ?? "";
    part("place").hidden = !place;
  }

  #click(target) {
    const item = target.closest("li");
    if (target.matches(".rename")) this.#rename(item);
    if (target.matches(".delete")) this.#delete(item);
  }

  // Shows a field for a new name. Enter or leaving the field accepts the new name; Escape keeps the old name.
  #rename(item) {
    const [link, field] = [item.querySelector("a"), document.createElement("input")];
    field.value = link.textContent;
    field.setAttribute("aria-label", "Name of the conversation");
    let ended = false; // removing the field causes a second call, by "blur"
    const end = async (title) => {
      if (ended) return;
      ended = true;
      const hadFocus = document.activeElement === field;
      field.replaceWith(link);
      if (hadFocus) item.querySelector(".rename").focus();
      if (title && title !== link.textContent) await store.change(item.dataset.id, (conversation) => (conversation.title = title));
      this.draw();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault(); // otherwise the key would also press the button that gets the focus
      end(event.key === "Enter" ? field.value.trim() : "");
    });
    field.addEventListener("blur", () => end(field.value.trim()));
    link.replaceWith(field);
    field.select();
  }

  async #delete(item) {
    const neighbour = item.nextElementSibling ?? item.previousElementSibling;
    neighbour?.querySelector("a").focus(); // not the button: a held key would delete the neighbour, too
    const [id, title] = [item.dataset.id, item.querySelector("a").textContent];
    store.askToStop(id);
    this.#undo = await store.remove(id);
    if (!this.#undo) return;
    // Undo brings back what this browser has: of an answer that has ended, all of it.
    for (const turn of this.#undo.turns) if (turn.kept) forget(turn.id);
    this.#say(`Deleted “${title}”.`, true);
    if (!neighbour) $("undo").focus();
  }

  async #restore() {
    const { conversations } = this.#undo;
    await store.add(this.#undo);
    this.#say(`“${conversations[0].title}” is back.`);
    await this.draw();
    $("list").querySelector(`[data-id="${conversations[0].id}"] a`)?.focus();
  }

  #say(text, canUndo = false) {
    clearTimeout(this.#timer);
    $("said").textContent = text;
    $("undo").hidden = !canUndo;
    if (!canUndo) this.#undo = null;
    else this.#timer = setTimeout(() => this.#say(""), UNDO_MS);
  }

  async #export() {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([fileOf(await store.everything())], { type: "application/json" }));
    link.download = `sluice-conversations-${new Date().toISOString().slice(0, 10)}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  async #import() {
    const [file] = $("imported").files;
    $("imported").value = "";
    try {
      const content = contentOf(await file.text());
      const changed = await store.add(content);
      if (changed === undefined) return; // the store has reported the failure
      const known = content.conversations.length - changed;
      this.#say(`Imported ${changed} conversation${changed === 1 ? "" : "s"}${known ? `; ${known} were here already` : ""}.`);
    } catch (error) {
      this.#say(`${file.name} was not imported: ${error.message}. Nothing has changed.`);
    }
  }
}
