// The request of a turn as JSON text, and as a command for the shell.

import { apiKey, model } from "./api.js";

// `groups`: fields with their values as JSON text; the model's name is added, and asked of the server the first time.
export async function bodyOf(...groups) {
  const fields = Object.assign({ model: JSON.stringify(await model()) }, ...groups);
  return `{${Object.entries(fields).map(([name, json]) => `${JSON.stringify(name)}:${json}`).join(",")}}`;
}

// The shell fills in the key.
export function curl(path, body) {
  const key = apiKey.get() ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : "";
  const url = new URL(path, location.href).href;
  return `curl -N '${url}' \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${body.replaceAll("'", "'\\''")}'\n`;
}
