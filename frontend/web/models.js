// The choice of the model in the header, which is shown if the server lists several models or adapters.

import { access, get } from "./api.js";
import { showRecommended } from "./knobs.js";

const EVERY_MS = 5000; // how often the list is read again, if models are loaded on demand
const chooser = document.getElementById("chooser");
const select = document.getElementById("model");
let known = false;
let rows = [];

// Returns the name of the chosen model. Requests the list of models first, unless the server has already sent it.
export async function model() {
  if (!known) await refresh();
  return select.value;
}

// Returns the values that the authors of the chosen model recommend, for fields that the settings leave empty, as
// {field: JSON text}.
export function recommended() {
  const found = rows.find(({ id }) => id === select.value)?.recommended_sampling ?? {};
  return Object.fromEntries(Object.entries(found).map(([name, value]) => [name, JSON.stringify(value)]));
}

async function refresh() {
  const { data } = await get("v1/models");
  rows = data;
  const wanted = select.value || localStorage.getItem("model");
  const listed = data.map(({ id }) => id);
  if (document.activeElement !== select || !known) {
    select.replaceChildren(...data.map((one) => new Option(described(one), one.id)));
    select.value = listed.includes(wanted) ? wanted : listed[0];
  }
  chooser.hidden = listed.length < 2;
  showRecommended(recommended());
  known = true;
  return data;
}

function described({ id, parent, status }) {
  if (parent) return `${id} (adapter)`;
  return status && status.value !== "loaded" ? `${id} (${status.value})` : id;
}

let timer = 0;

// Reads the list of models again and again, if there are several models. Stops after a failure, because a server with
// API keys would otherwise ask for a key again and again; the next request of the user shows the failure anyway.
async function follow() {
  clearTimeout(timer);
  const listed = document.hidden ? null : await refresh().catch(() => []);
  if (!listed || listed.length > 1) timer = setTimeout(follow, EVERY_MS);
}

select.addEventListener("change", () => {
  localStorage.setItem("model", select.value);
  showRecommended(recommended());
});
access.addEventListener("changed", follow);
follow();
