// The token-probability view: an answer as spans, and the alternatives of the clicked token.
// The model's text is only ever set as `textContent`, never parsed as HTML.

const rivals = document.getElementById("rivals");

export const percent = (p) => (p >= 0.9995 ? "100 %" : p < 0.0005 ? "< 0.1 %" : `${(p * 100).toFixed(1)} %`);

// Returns a text with visible spaces and line ends, so that tokens like " a" and "a" can be told apart.
const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

export function paint(span, p) {
  span.style.setProperty("--doubt", `${Math.round((1 - p) * 100)}%`);
}

// Returns the span of a token. Only the first token of an answer is in the tab order; arrow keys move to the others.
export function tokenSpan(token, first) {
  const span = document.createElement("span");
  const p = Math.exp(token.logprob);
  span.className = "token";
  span.textContent = token.text;
  if (!token.text) span.dataset.silent = visible(token.name); // the token is part of a character, or an end token
  span.tabIndex = first ? 0 : -1;
  span.setAttribute("role", "button");
  span.setAttribute("aria-label", `${visible(token.name)}, ${percent(p)}`);
  paint(span, p);
  span.token = token;
  return span;
}

export function watch(log) {
  log.addEventListener("click", (event) => event.target.token && show(event.target));
  log.addEventListener("scroll", () => rivals.hidePopover());
  log.addEventListener("keydown", (event) => {
    const span = event.target;
    if (!span.token) return;
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (step) span[step]?.focus();
    else if (event.key === "Enter" || event.key === " ") show(span);
    else return;
    event.preventDefault();
  });
}

function show(span) {
  const { name, logprob, top } = span.token;
  const listed = top.some(([text]) => text === name) ? top : [...top, [name, logprob]];
  rivals.replaceChildren(...listed.map(([text, score]) => row(text, Math.exp(score), text === name)));
  rivals.showPopover();
  const at = span.getClientRects()[0];
  const left = Math.min(at.left, innerWidth - rivals.offsetWidth - 8);
  const below = at.bottom + 6;
  const top_ = below + rivals.offsetHeight > innerHeight ? at.top - rivals.offsetHeight - 6 : below;
  rivals.style.left = `${Math.max(8, left)}px`;
  rivals.style.top = `${Math.max(8, top_)}px`;
}

function row(text, p, chosen) {
  const row = document.createElement("div");
  row.className = chosen ? "rival chosen" : "rival";
  row.style.setProperty("--p", `${p * 100}%`);
  const [name, share] = [document.createElement("code"), document.createElement("span")];
  name.textContent = visible(text);
  share.textContent = percent(p);
  row.append(name, share);
  return row;
}
