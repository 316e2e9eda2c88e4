// The list of the server's models behind the button "Models": their states, loading and unloading, and fetching others
// where the server allows it. Only shown where models are loaded on demand.

import { lines, post } from "./api.js";
import { follow, listed, stateOf } from "./models.js";

const $ = (id) => document.getElementById(id);
const [opener, section, form, said, stop] = ["models", "stock", "pull", "fetched", "unpull"].map($);
const progress = form.querySelector("progress");
let fetching = null; // the AbortController of the download that this page waits for

function draw() {
  const rows = listed.rows.filter(({ status }) => status?.on_demand);
  opener.hidden = !rows.length;
  if (opener.hidden) show(false);
  form.hidden = !listed.allowsPull;
  if (!section.hidden) $("shelf").replaceChildren(...rows.map(item));
}

function item({ id, parent, status }) {
  const line = document.createElement("li");
  line.dataset.state = status.value;
  const words = [stateOf(status), parent && `made from ${parent}`, status.value === "failed" && status.reason];
  line.append(part("name", id), part("status", words.filter(Boolean).join(", ")));
  if (status.progress !== undefined) line.append(Object.assign(document.createElement("progress"), { value: status.progress }));
  const action = { unloaded: "load", failed: "load", loaded: "unload" }[status.value];
  if (action) line.append(button(action, id));
  return line;
}

function part(name, text) {
  return Object.assign(document.createElement("span"), { className: name, textContent: text });
}

function button(action, model) {
  const made = Object.assign(document.createElement("button"), { type: "button", className: "quiet" });
  made.textContent = action === "load" ? "Load" : "Unload";
  made.setAttribute("aria-label", `${made.textContent} ${model}`);
  made.addEventListener("click", async () => {
    made.disabled = true;
    said.textContent = "";
    await post(`models/${action}`, { model }).catch(({ message }) => (said.textContent = message));
    follow();
  });
  return made;
}

function show(shown) {
  section.hidden = !shown;
  opener.setAttribute("aria-expanded", String(shown));
}

// Fetches a model and shows how far the download is. A download that is stopped continues when it is asked for again.
async function fetchModel(model) {
  fetching = new AbortController();
  [stop.hidden, progress.hidden] = [false, false];
  progress.removeAttribute("value");
  said.textContent = "";
  try {
    for await (const { status, total, completed } of lines("api/pull", { model }, fetching.signal)) {
      if (total) progress.value = completed / total;
      said.textContent = total ? `${status}: ${Math.floor((100 * completed) / total)} %` : status;
    }
    said.textContent = `${model} is here.`;
    form.reset();
  } catch (error) {
    said.textContent = error.name === "AbortError" ? "Stopped; fetching it again continues." : error.message;
  } finally {
    fetching = null;
    [stop.hidden, progress.hidden] = [true, true];
    follow();
  }
}

opener.addEventListener("click", () => {
  show(section.hidden);
  draw();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const model = form.elements.name.value.trim();
  if (model && !fetching) fetchModel(model);
});
stop.addEventListener("click", () => fetching?.abort());
listed.addEventListener("changed", draw);
draw();
