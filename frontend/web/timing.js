// The line under an answer, and the format of numbers. The page measures times; the parts in ms are the server's.

export function milliseconds(ms) {
  if (ms >= 9950) return `${(ms / 1000).toFixed(0)} s`;
  if (ms >= 995) return `${Number((ms / 1000).toFixed(1))} s`;
  return `${Number(ms.toFixed(ms < 9.95 ? 1 : 0))} ms`;
}

const FINISH = { stop: "finished: stop", length: "finished: length (max_tokens reached)" };

// `clock` is {ttft, span, began} in ms, from sending to the first text and from there to the last.
export function timingLine(state, clock, { finish, stop, seed, usage, timings }) {
  const parts = [];
  if (state === "stopped") parts.push("stopped by you");
  if (state === "failed") parts.push("failed: not finished, and not part of the conversation");
  if (state === "done") parts.push(stop ? `finished: stop ${JSON.stringify(stop)}` : (FINISH[finish] ?? `finished: ${finish}`));
  if (clock.began) parts.push(`TTFT ${milliseconds(clock.ttft)}`);
  if (usage) parts.push(...counts(clock, usage));
  if (timings) parts.push(...["queue", "prefill", "decode"].map((name) => `${name} ${milliseconds(timings[`${name}_ms`])}`));
  if (seed) parts.push(`seed ${seed}`);
  return parts.join(" · ");
}

function counts(clock, usage) {
  const { prompt_tokens: prompt, completion_tokens: made, prompt_tokens_details: details } = usage;
  const speed = made > 1 && clock.span > 0 ? [`${(((made - 1) * 1000) / clock.span).toFixed(0)} tokens/s`] : [];
  return [...speed, `${made} token${made === 1 ? "" : "s"}`, `${details.cached_tokens} of ${prompt} prompt tokens cached`];
}
