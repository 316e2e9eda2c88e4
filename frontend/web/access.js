// The field for an API key: folded away until the server asks for one, or the user opens it.

import { access, apiKey } from "./api.js";

const $ = (id) => document.getElementById(id);
const [form, field, opener] = [$("access"), $("secret"), $("key")];

const HINTS = {
  none: "Needed only where the server has --api-keys. It stays in this browser tab, and goes to this server only.",
  wanted: "This server wants an API key.",
  odd: "No key looks like this: keys are letters, digits and signs of ASCII, without spaces.",
  refused: "This server does not know this key.",
  tried: "Trying it…",
  accepted: "The server accepts this key. It stays in this browser tab, and goes to this server only.",
};

function show(shown) {
  form.hidden = !shown;
  opener.setAttribute("aria-expanded", String(shown));
}

function say(hint) {
  if ($("hint").textContent !== HINTS[hint]) $("hint").textContent = HINTS[hint];
  form.dataset.hint = hint;
  $("forget").disabled = !apiKey.get();
  field.setAttribute("aria-invalid", String(hint === "refused" || hint === "odd"));
}

function take(key) {
  if (!/^[!-~]*$/.test(key)) return say("odd"); // a browser cannot send such a key in a header
  say(key ? "tried" : "none");
  apiKey.set(key);
}

field.value = apiKey.get();
say(field.value ? "tried" : "none");
opener.addEventListener("click", () => {
  show(form.hidden);
  if (!form.hidden) field.focus();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  take(field.value.trim());
});
$("forget").addEventListener("click", () => {
  field.value = "";
  field.focus();
  take("");
});
access.addEventListener("refused", () => {
  say(apiKey.get() ? "refused" : "wanted");
  show(true);
});
access.addEventListener("accepted", () => {
  if (form.dataset.hint === "tried") say("accepted");
  if (form.dataset.hint !== "accepted" || form.contains(document.activeElement)) return;
  show(false);
});
