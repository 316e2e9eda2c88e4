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

// Browsers offer the clipboard to https and localhost only; elsewhere the old way still works.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.body.appendChild(document.createElement("textarea"));
  area.value = text;
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("no clipboard");
}

// Does what the button is for, and says on the button whether it worked.
export async function copyBy(button, makeText) {
  const label = (button.dataset.label ??= button.textContent);
  try {
    await copy(await makeText());
    button.textContent = "Copied";
  } catch {
    button.textContent = "Could not copy";
  }
  setTimeout(() => (button.textContent = label), 1500);
}
