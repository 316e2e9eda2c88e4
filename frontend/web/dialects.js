// What chat and text completion say differently: the path, the question in a request, the tokens in a chunk.
// A token is {text, logprob, top: [[text, logprob], …]}; the texts of a chunk's tokens joined are its text.

const RIVALS = 5;

export const chat = {
  name: "chat",
  path: "v1/chat/completions",
  send: "Send",
  placeholder: "Say something. Enter sends, Shift+Enter makes a new line.",
  enterSends: true,
  hasSystem: true,
  probabilities: { logprobs: "true", top_logprobs: String(RIVALS) },

  // `turns` are the earlier ones that were answered.
  question(text, turns, system) {
    const messages = turns.flatMap((turn) => [
      { role: "user", content: turn.question },
      { role: "assistant", content: turn.text },
    ]);
    if (system) messages.unshift({ role: "system", content: system });
    return { messages: JSON.stringify([...messages, { role: "user", content: text }]) };
  },

  text: (choice) => choice.delta.content ?? "",

  // A chunk has its tokens' bytes, but a character may span several tokens: `decoder` lives as long as the answer.
  tokens(choice, decoder) {
    const entries = choice.logprobs?.content ?? [];
    let rest = chat.text(choice);
    return entries.map((entry, i) => {
      const decoded = decoder.decode(new Uint8Array(entry.bytes ?? []), { stream: true });
      const text = i === entries.length - 1 ? rest : rest.slice(0, decoded.length);
      rest = rest.slice(text.length);
      return { text, name: entry.token, logprob: entry.logprob, top: entry.top_logprobs.map((e) => [e.token, e.logprob]) };
    });
  },
};

export const completion = {
  name: "completion",
  path: "v1/completions",
  send: "Complete",
  placeholder: "A text to go on with. Ctrl+Enter sends.",
  enterSends: false,
  hasSystem: false,
  probabilities: { logprobs: String(RIVALS) },

  question: (text) => ({ prompt: JSON.stringify(text) }),

  text: (choice) => choice.text,

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
