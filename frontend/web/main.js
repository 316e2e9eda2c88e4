// Puts the page together: tabs, theme, and the parameters of the address.
//
// `/?prompt=…` fills in the question; `&send=1` sends it as soon as the server is ready; `&tab=completion`,
// `&probabilities=1` and `&theme=dark` set what they name. Useful for links, demonstrations and screenshots.

import "./access.js";
import * as dialects from "./dialects.js";
import { setProbabilities } from "./knobs.js";
import { Live } from "./live.js";
import { Panel } from "./panel.js";
import { paint } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.search);

// tabs

const names = ["chat", "completion"];
const panels = Object.fromEntries(names.map((name) => [name, new Panel($(name), dialects[name])]));

function open(name) {
  for (const each of names) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
}

for (const [i, name] of names.entries()) {
  $(`tab-${name}`).addEventListener("click", () => open(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const other = names[1 - i];
    open(other);
    $(`tab-${other}`).focus();
  });
}

// theme

const THEMES = ["auto", "light", "dark"];

function wear(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
}

wear(THEMES.find((theme) => theme === (asked.get("theme") ?? localStorage.getItem("theme"))) ?? "auto");

// the rest

for (const sample of document.querySelectorAll("[data-p]")) paint(sample, Number(sample.dataset.p));

const roomy = matchMedia("(min-width: 60rem)");
for (const name of ["settings", "live"]) $(name).open = roomy.matches;

const tab = asked.get("tab") === "completion" ? "completion" : "chat";
open(tab);
if (asked.has("prompt")) panels[tab].input.value = asked.get("prompt");
if (asked.get("probabilities") === "1") setProbabilities(true);
let waiting = asked.get("send") === "1";

const live = new Live(() => {
  if (waiting) panels[tab].send();
  waiting = false;
});

$("theme").addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem("theme", theme);
  wear(theme);
  live.draw();
});
$("live").addEventListener("toggle", () => live.draw());
addEventListener("resize", () => live.draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.draw());
