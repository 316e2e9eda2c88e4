// Puts the page together: conversations, tabs, theme, and the parameters of the address.
//
// The part of the address after `#` is the id of the open conversation. `/?prompt=…` fills in the question; `&send=1`
// sends the question as soon as the server is ready; `&tab=completion`, `&probabilities=1` and `&theme=dark` set the
// tab, the probabilities and the theme. These parameters are for links, demonstrations and screenshots.
//
// The scripts of the page (the head of each script says more):
//
// conversations    turns (a turn as plain data), tree (the turns of one conversation), store (all of them, in the browser's
//                  database), transfer and shapes (as a file, which is checked), sidebar (their list), kept (the server's)
// requests         api (HTTP and streams), api_formats (chat and completion), request (the body), knobs (the settings),
//                  run (one answer), runs (all answers of this tab)
// one tab          panel (the whole), composer (the next question), files (for it), extras (system prompt, tools),
//                  turn_view (a turn with its buttons), answer (its answer), calls (its tool calls), timing (the line under it)
// text             prose (a growing text), markdown, maths, code, tokens (with probabilities)
// the header       models (which one answers), stock (all of them, and fetching more), access (the API key), live (the server's state), chart, events
// everywhere       clipboard

import "./access.js";
import * as apiFormats from "./api_formats.js";
import "./kept.js";
import { keepSettings, setProbabilities } from "./knobs.js";
import { Live } from "./live.js";
import { Panel } from "./panel.js";
import { Runs } from "./runs.js";
import { Sidebar, current } from "./sidebar.js";
import "./stock.js";
import * as store from "./store.js";
import { paint } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.search);

// tabs

const names = ["chat", "completion"];
const runs = new Runs();
const sidebar = new Sidebar();
const panels = Object.fromEntries(names.map((name) => [name, new Panel($(name), apiFormats[name], runs, address)]));
let shown = names[0];

// Names a panel's conversation in the address, if the panel is shown.
function address(panel) {
  if (panel === panels[shown]) history.replaceState(null, "", `${location.pathname}${location.search}#${panel.id}`);
  sidebar.draw();
}

function show(name) {
  shown = name;
  for (const each of names) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
}

function turnTo(name) {
  show(name);
  address(panels[name]);
}

for (const [i, name] of names.entries()) {
  $(`tab-${name}`).addEventListener("click", () => turnTo(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const other = names[1 - i];
    turnTo(other);
    $(`tab-${other}`).focus();
  });
}

// conversations

// Opens the conversation that the address names.
async function open() {
  const id = current();
  const conversation = id && (await store.conversation(id).catch(() => null)); // the sidebar reports the error
  if (id !== current()) return; // another conversation was chosen meanwhile
  if (conversation) show(conversation.kind);
  await panels[shown].open(conversation?.id ?? "");
  sidebar.draw();
}

addEventListener("hashchange", open);
$("begin").addEventListener("click", () => begin());
document.addEventListener("click", ({ target }) => target.matches(".fresh") && begin());

async function begin() {
  history.pushState(null, "", location.pathname + location.search);
  await panels[shown].begin();
  sidebar.draw();
  if (!roomy.matches) $("history").open = false;
}

$("history").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || roomy.matches) return;
  $("history").open = false;
  $("history").querySelector("summary").focus();
});

$("list").addEventListener("click", ({ target }) => {
  if (target.matches("a") && !roomy.matches) $("history").open = false;
});

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
for (const name of ["history", "settings", "live"]) $(name).open = roomy.matches;

keepSettings();
if (asked.get("probabilities") === "1") setProbabilities(true);
show(asked.get("tab") === "completion" ? "completion" : "chat");
for (const name of names) if (name !== shown) await panels[name].open("");
await runs.returned();
await open();
const isNew = !panels[shown].id; // a reload must not ask the question of the address again
if (isNew && asked.has("prompt")) panels[shown].composer.fill(asked.get("prompt"));
let waiting = isNew && asked.get("send") === "1";

function onReady() {
  runs.takeUp().catch(() => {});
  if (waiting) panels[shown].send();
  waiting = false;
}

const live = new Live(onReady, (stats) => names.forEach((name) => panels[name].sayWaiting(stats.waiting)));

$("kept").addEventListener("chosen", ({ detail }) => runs.takeUpLater(detail.turn));
$("theme").addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem("theme", theme);
  wear(theme);
  live.draw();
});
$("live").addEventListener("toggle", () => live.draw());
addEventListener("resize", () => live.draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.draw());
