// The line under an answer, and the format of numbers. The page measures TTFT and speed; the server measures queue,
// prefill and decode.

export function milliseconds(ms) {
  if (ms >= 9950) return `${(ms / 1000).toFixed(0)} s`;
  if (ms >= 995) return `${Number((ms / 1000).toFixed(1))} s`;
  return `${Number(ms.toFixed(ms < 9.95 ? 1 : 0))} ms`;
}

const FINISH = { stop: "finished: stop", length: "finished: length (max_tokens reached)" };

// Returns the line for a turn whose answer has ended. `clock` has the times of sending, of the first text and of the
// last.
export function timingLine({ state, clock, taken, end: { finish, stop, seed, usage, timings } }) {
  const parts = [];
  if (state === "stopped") parts.push("stopped by you");
  if (state === "failed") parts.push("failed: not finished, and not part of the conversation");
  if (state === "done") parts.push(stop ? `finished: stop ${JSON.stringify(stop)}` : (FINISH[finish] ?? `finished: ${finish}`));
  if (taken) parts.push(taken > 1 ? `taken up again ${taken} times` : "taken up again");
  if (clock.first) parts.push(`TTFT ${milliseconds(clock.first - clock.sent)}`);
  if (usage) parts.push(...counts(taken ? 0 : clock.last - clock.first, usage));
  const times = ["queue", "prefill", "decode"].map((name) => [name, timings?.[`${name}_ms`]]);
  parts.push(...times.filter(([, ms]) => Number.isFinite(ms)).map(([name, ms]) => `${name} ${milliseconds(ms)}`));
  if (timings?.draft_tokens) parts.push(`${timings.accepted_draft_tokens} of ${timings.draft_tokens} drafts accepted`);
  if (seed) parts.push(`seed ${seed}`);
  return parts.join(" · ");
}

// Other servers and proxies leave out what they do not count. `span`: milliseconds from the first text to the last; 0 if
// the page did not see all of the answer
function counts(span, usage) {
  const { prompt_tokens: prompt, completion_tokens: made, prompt_tokens_details: details } = usage;
  const speed = made > 1 && span > 0 ? [`${(((made - 1) * 1000) / span).toFixed(0)} tokens/s`] : [];
  const total = Number.isFinite(made) ? [`${made} token${made === 1 ? "" : "s"}`] : [];
  const cached = details?.cached_tokens;
  const asked = Number.isFinite(cached) ? [`${cached} of ${prompt} prompt tokens cached`] : [`${prompt} prompt tokens`];
  return [...speed, ...total, ...(Number.isFinite(prompt) ? asked : [])];
}
