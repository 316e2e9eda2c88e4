// The choice of the model in the header, which is shown if the server lists several models or adapters.

import { access, get } from "./api.js";
import { showRecommended } from "./knobs.js";

const EVERY_MS = 5000; // how often the list is read again, if models are loaded on demand
const SOON_MS = 1000; // the same while a model is loaded or fetched
// Dispatches "changed" when the list was read; `rows` and `allowsPull` then have it.
export const listed = Object.assign(new EventTarget(), { rows: [], allowsPull: false });
const chooser = document.getElementById("chooser");
const select = document.getElementById("model");
let known = false;

// Returns the name of the chosen model. Requests the list of models first, unless the server has already sent it.
export async function model() {
  if (!known) await refresh();
  return select.value;
}

// Returns the values that the authors of the chosen model recommend, for fields that the settings leave empty, as
// {field: JSON text}.
export function recommended() {
  const found = listed.rows.find(({ id }) => id === select.value)?.recommended_sampling ?? {};
  return Object.fromEntries(Object.entries(found).map(([name, value]) => [name, JSON.stringify(value)]));
}

async function refresh() {
  const { data, allows_pull: allowsPull = false } = await get("v1/models");
  Object.assign(listed, { rows: data, allowsPull });
  const wanted = select.value || localStorage.getItem("model");
  const ids = data.map(({ id }) => id);
  if (document.activeElement !== select || !known) {
    select.replaceChildren(...data.map((one) => new Option(described(one), one.id)));
    select.value = ids.includes(wanted) ? wanted : ids[0];
  }
  chooser.hidden = ids.length < 2;
  showRecommended(recommended());
  known = true;
  listed.dispatchEvent(new Event("changed"));
  return data;
}

function described({ id, parent, status }) {
  if (parent && !status?.on_demand) return `${id} (adapter)`;
  return status && status.value !== "loaded" ? `${id} (${stateOf(status)})` : id;
}

// Returns the state of a model in words, with the progress of its download.
export function stateOf({ value, progress }) {
  return progress === undefined ? value : `fetching, ${Math.floor(progress * 100)} %`;
}

let timer = 0;

// Reads the list of models again and again, if there are several models. Stops after a failure, because a server with
// API keys would otherwise ask for a key again and again; the next request of the user shows the failure anyway.
export async function follow() {
  clearTimeout(timer);
  const rows = document.hidden ? null : await refresh().catch(() => []);
  const busy = rows?.some(({ status }) => status?.value === "loading");
  if (!rows || rows.length > 1 || rows[0]?.status?.on_demand) timer = setTimeout(follow, busy ? SOON_MS : EVERY_MS);
}

select.addEventListener("change", () => {
  localStorage.setItem("model", select.value);
  showRecommended(recommended());
});
access.addEventListener("changed", follow);
follow();
