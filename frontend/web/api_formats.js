// How the API formats of chat and text completion differ: the path, the question in a request, the text of a chunk. A
// token is {text, name, logprob, top: [[name, logprob], …]}; the joined texts of a chunk's tokens are the chunk's text.

import { withFiles } from "./files.js";

const RIVALS = 5;

export const chat = {
  name: "chat",
  path: "v1/chat/completions",
  send: "Send",
  placeholder: "Say something. Enter sends, Shift+Enter makes a new line.",
  enterSends: true,
  takesFiles: true,
  hasMarkdown: true, // answers are shown as Markdown
  extras: ["system", "tools", "response_format"],
  probabilities: { logprobs: "true", top_logprobs: String(RIVALS) },

  // Returns the messages of a request. `turn` is the new turn, `turns` are the earlier turns with an answer.
  question(turn, turns, system) {
    const messages = turns.flatMap((earlier) => [...asked(earlier), answered(earlier)]);
    if (system) messages.unshift({ role: "system", content: system });
    return { messages: JSON.stringify([...messages, ...asked(turn)]) };
  },

  said: ({ delta }) => ({ thought: delta.reasoning_content ?? "", text: delta.content ?? "", calls: delta.tool_calls ?? [] }),

  // Returns the tokens of a chunk. A chunk has the bytes of its tokens, but a character may span several tokens, so one
  // `decoder` serves the whole answer. The special tokens around reasoning and calls are not part of the text; those
  // before the text are left out.
  tokens(choice, decoder) {
    const { thought, text } = chat.said(choice);
    const entries = (choice.logprobs?.content ?? []).map((entry) => ({
      entry, decoded: decoder.decode(new Uint8Array(entry.bytes ?? []), { stream: true }),
    }));
    let rest = thought || text;
    let hidden = rest ? Math.max(0, entries.map(({ decoded }) => decoded).join("").indexOf(rest)) : 0;
    return entries.flatMap(({ entry, decoded }, i) => {
      const before = Math.min(hidden, decoded.length);
      hidden -= before;
      if (before && before === decoded.length) return [];
      const own = i === entries.length - 1 ? rest : rest.slice(0, decoded.length - before);
      rest = rest.slice(own.length);
      return { text: own, name: entry.token, logprob: entry.logprob, top: entry.top_logprobs.map((e) => [e.token, e.logprob]) };
    });
  },
};

const asked = ({ question, files, results }) => results ?? [{ role: "user", content: withFiles(question, files) }];

// Returns an answer as a message. It has the reasoning only if it has calls, as a model needs the reasoning for its
// calls' results.
function answered({ text, thought, calls }) {
  if (!calls.length) return { role: "assistant", content: text };
  return { role: "assistant", content: text, tool_calls: calls, ...(thought && { reasoning_content: thought }) };
}

export const completion = {
  name: "completion",
  path: "v1/completions",
  send: "Complete",
  placeholder: "A text to go on with. Ctrl+Enter sends.",
  enterSends: false,
  takesFiles: false,
  hasMarkdown: false,
  extras: ["response_format"],
  probabilities: { logprobs: String(RIVALS) },

  question: ({ question }) => ({ prompt: JSON.stringify(question) }),

  said: ({ text }) => ({ thought: "", text, calls: [] }),

  // Returns the tokens of a chunk. The server's offsets count characters, but JavaScript counts UTF-16 units, so the
  // text is made an array of characters.
  tokens(choice) {
    const scores = choice.logprobs;
    if (!scores) return [];
    const letters = Array.from(choice.text);
    const starts = scores.text_offset.map((offset) => offset - scores.text_offset[0]);
    return scores.tokens.map((name, i) => ({
      text: letters.slice(starts[i], starts[i + 1]).join(""),
      name,
      logprob: scores.token_logprobs[i],
      top: Object.entries(scores.top_logprobs[i] ?? {}).sort((a, b) => b[1] - a[1]),
    }));
  },
};
