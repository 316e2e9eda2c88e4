// The request of a turn as JSON text, and as a command for the shell.

import { apiKey } from "./api.js";
import { model, recommended } from "./models.js";

// Returns the body of a request as JSON text. `groups` are fields with their values as JSON text; the name of the
// chosen model and the sampling that is recommended for it are added.
export async function bodyOf(...groups) {
  const name = await model(); // comes first, as it may load the list with the recommendations
  const fields = Object.assign({ model: JSON.stringify(name) }, recommended(), ...groups);
  return `{${Object.entries(fields).map(([name, json]) => `${JSON.stringify(name)}:${json}`).join(",")}}`;
}

// Returns a curl command that sends a body. The shell fills in the API key from $API_KEY.
export function curl(path, body) {
  const key = apiKey.get() ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : "";
  const url = new URL(path, location.href).href;
  return `curl -N '${url}' \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${body.replaceAll("'", "'\\''")}'\n`;
}
