// How the API formats of chat and text completion differ: the path, the question in a request, the text of a chunk.
// A token is {text, name, logprob, top: [[name, logprob], …]}; the texts of a chunk's tokens joined are its text.

import { withFiles } from "./files.js";

const RIVALS = 5;

export const chat = {
  name: "chat",
  path: "v1/chat/completions",
  send: "Send",
  placeholder: "Say something. Enter sends, Shift+Enter makes a new line.",
  enterSends: true,
  takesFiles: true,
  hasMarkdown: true, // its answers
  extras: ["system", "tools", "response_format"],
  probabilities: { logprobs: "true", top_logprobs: String(RIVALS) },

  // `turn` is the new turn, `turns` are the earlier ones that were answered.
  question(turn, turns, system) {
    const messages = turns.flatMap((earlier) => [...asked(earlier), answered(earlier)]);
    if (system) messages.unshift({ role: "system", content: system });
    return { messages: JSON.stringify([...messages, ...asked(turn)]) };
  },

  said: ({ delta }) => ({ thought: delta.reasoning_content ?? "", text: delta.content ?? "", calls: delta.tool_calls ?? [] }),

  // A chunk has its tokens' bytes, but a character may span several tokens: `decoder` lives as long as the answer.
  // Marks around reasoning and calls are tokens, too, but not part of the text: marks before the text are left out.
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

// Reasoning is sent back only with calls: the model reads it again together with their results.
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

  // The server counts characters, JavaScript counts UTF-16 units: hence the array.
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
