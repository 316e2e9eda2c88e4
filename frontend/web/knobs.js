// The settings as fields of a request. Values are JSON text, not JavaScript values, because a seed has 64 bits. Text
// that is not a number is sent as it was typed, and the server's error then says what is wrong.

const form = document.getElementById("knobs");
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

form.addEventListener("submit", (event) => event.preventDefault());

export const showsProbabilities = () => form.probabilities.checked;
export const setProbabilities = (on) => (form.probabilities.checked = on);

const asJson = (text) => (/^-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?$/i.test(text) ? text : JSON.stringify(text));
const unescaped = (line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t");

// Returns the fields that are filled in, as {field: JSON text}. The server has defaults for the others.
export function sampling() {
  const given = NUMBERS.map((name) => [name, form[name].value.trim()]).filter(([, text]) => text);
  const fields = Object.fromEntries(given.map(([name, text]) => [name, asJson(text)]));
  const stops = form.stop.value.split("\n").filter((line) => line).map(unescaped);
  return stops.length ? { ...fields, stop: JSON.stringify(stops) } : fields;
}

// Shows in each empty field the value that applies: the recommended one, which is sent, or else the server's default.
export function showRecommended(fields) {
  for (const name of NUMBERS) {
    form[name].dataset.plain ??= form[name].placeholder;
    form[name].placeholder = fields[name] ?? form[name].dataset.plain;
  }
}

// Marks the field that the server refused, and no other. The error may name a part of a field, such as
// `tools[0].function`. `fields` are those outside the settings.
export function blame(param, fields = []) {
  const name = /^\w+/.exec(param ?? "")?.[0];
  for (const field of [...form.elements, ...fields]) {
    if (name && field.name === name) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}

addEventListener("input", (event) => event.target.removeAttribute("aria-invalid"));

// Restores the settings that this browser has kept, and keeps each change.
export function keepSettings() {
  const kept = JSON.parse(localStorage.getItem("settings") ?? "{}");
  const fields = [...form.elements].filter(({ name }) => name);
  const slot = (field) => (field.type === "checkbox" ? "checked" : "value");
  for (const field of fields) if (field.name in kept) field[slot(field)] = kept[field.name];
  form.addEventListener("input", () => {
    localStorage.setItem("settings", JSON.stringify(Object.fromEntries(fields.map((field) => [field.name, field[slot(field)]]))));
  });
}
