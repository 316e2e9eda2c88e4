// The settings as fields of a request. Values are JSON text, not JavaScript values: a seed has 64 bits, and text that is
// not a number goes to the server as it was typed, whose error then says what is wrong.

const form = document.getElementById("knobs");
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

form.addEventListener("submit", (event) => event.preventDefault());

export const showsProbabilities = () => form.probabilities.checked;
export const setProbabilities = (on) => (form.probabilities.checked = on);

const asJson = (text) => (/^-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?$/i.test(text) ? text : JSON.stringify(text));
const unescaped = (line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t");

// {field: JSON text}; empty fields are left to the server.
export function sampling() {
  const given = NUMBERS.map((name) => [name, form[name].value.trim()]).filter(([, text]) => text);
  const fields = Object.fromEntries(given.map(([name, text]) => [name, asJson(text)]));
  const stops = form.stop.value.split("\n").filter((line) => line).map(unescaped);
  return stops.length ? { ...fields, stop: JSON.stringify(stops) } : fields;
}

// Shows in empty fields what is sent for them: what is recommended, else what the server takes.
export function showRecommended(fields) {
  for (const name of NUMBERS) {
    form[name].dataset.plain ??= form[name].placeholder;
    form[name].placeholder = fields[name] ?? form[name].dataset.plain;
  }
}

// Marks only the field among `fields` that the server refused. The error may name a part of it: `tools[0].function`.
export function blame(param, fields = []) {
  const name = /^\w+/.exec(param ?? "")?.[0];
  for (const field of [...form.elements, ...fields]) {
    if (name && field.name === name) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}

addEventListener("input", (event) => event.target.removeAttribute("aria-invalid"));

// Restores the settings of this browser, and keeps them as they change.
export function keepSettings() {
  const kept = JSON.parse(localStorage.getItem("settings") ?? "{}");
  const fields = [...form.elements].filter(({ name }) => name);
  const slot = (field) => (field.type === "checkbox" ? "checked" : "value");
  for (const field of fields) if (field.name in kept) field[slot(field)] = kept[field.name];
  form.addEventListener("input", () => {
    localStorage.setItem("settings", JSON.stringify(Object.fromEntries(fields.map((field) => [field.name, field[slot(field)]]))));
  });
}
