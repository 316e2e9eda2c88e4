// The request of a turn as JSON text, and as a command for the shell.

import { apiKey } from "./api.js";
import { model, recommended } from "./models.js";

// `groups`: fields with their values as JSON text; the name of the chosen model and its recommended sampling are added.
export async function bodyOf(...groups) {
  const name = await model(); // first, as it may read the list in which the recommendations are
  const fields = Object.assign({ model: JSON.stringify(name) }, recommended(), ...groups);
  return `{${Object.entries(fields).map(([name, json]) => `${JSON.stringify(name)}:${json}`).join(",")}}`;
}

// The shell fills in the key.
export function curl(path, body) {
  const key = apiKey.get() ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : "";
  const url = new URL(path, location.href).href;
  return `curl -N '${url}' \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${body.replaceAll("'", "'\\''")}'\n`;
}
