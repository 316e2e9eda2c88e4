// Requests to the server: API keys, JSON responses, streams. Knows the server's errors, and nothing of the page.

const PATIENCE_MS = 8000;
const EVERY_MS = 1000;
const GATEWAY = [502, 504]; // a proxy does not reach the server

export class Failure extends Error {
  // `param` is the field that was refused, `retryAfter` the seconds that a 503 asks for. `isLost` says that the server or
  // the way to it was lost, so that the same request may succeed later.
  constructor(message, { status = 0, param = null, retryAfter = null, isLost = false } = {}) {
    super(message);
    Object.assign(this, { status, param, retryAfter, isLost });
  }
}

const lost = (message) => new Failure(message, { isLost: true });

// Dispatches "changed" when the key changes, and "refused" or "accepted" when a response shows whether the key is
// valid. A response to an earlier key, which may arrive after the change, says nothing of this one.
export const access = new EventTarget();
const tell = (name) => access.dispatchEvent(new Event(name));

export const apiKey = {
  get: () => sessionStorage.getItem("api-key") ?? "",
  set(key) {
    if (key) sessionStorage.setItem("api-key", key);
    else sessionStorage.removeItem("api-key");
    tell("changed");
  },
};

function headers() {
  const key = apiKey.get();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

// Makes a Failure of an error response, with the server's own message.
async function refusal(answer) {
  const said = await answer.json().catch(() => null);
  const error = typeof said?.error === "string" ? { message: said.error } : (said?.error ?? {}); // Ollama's routes: a text
  return new Failure(error.message ?? `the server answered ${answer.status} ${answer.statusText}`, {
    status: answer.status,
    param: error.param,
    retryAfter: answer.headers.get("Retry-After"),
    isLost: GATEWAY.includes(answer.status),
  });
}

async function reach(path, options) {
  const key = apiKey.get();
  try {
    const answer = await fetch(path, { cache: "no-store", headers: headers(), ...options });
    if (answer.status === 401 && key === apiKey.get()) tell("refused");
    return answer;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw lost(error.name === "TimeoutError" ? "the server does not answer" : "the server cannot be reached");
  }
}

// The options of a request that the server answers at once: it fails after PATIENCE_MS.
const soon = () => ({ signal: AbortSignal.timeout(PATIENCE_MS) });

export async function get(path) {
  const key = apiKey.get();
  const answer = await reach(path, soon());
  if (!answer.ok) throw await refusal(answer);
  if (key && key === apiKey.get()) tell("accepted");
  return answer.json();
}

export async function post(path, body) {
  const answer = await reach(path, { method: "POST", body: JSON.stringify(body), ...soon() });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

// Yields the objects of a response in lines of JSON. Throws a Failure if a line has an error.
export async function* lines(path, body, signal) {
  const answer = await reach(path, { method: "POST", body: JSON.stringify(body), signal });
  if (!answer.ok) throw await refusal(answer);
  for await (const line of pieces(answer.body, "\n")) {
    const object = JSON.parse(line);
    if (object.error) throw new Failure(object.error);
    yield object;
  }
}

// Returns {ready, reason}. A 503 of /ready has the reason in its body, so it is not a failure here.
export async function readiness() {
  const answer = await reach("ready", soon());
  const said = await answer.json().catch(() => ({ reason: `the server answered ${answer.status} ${answer.statusText}` })); // a proxy's page
  return { ready: said.status === "ready", reason: said.reason ?? "" };
}

// Resolves when the server is ready, at the earliest after a second, and at once when `signal` is aborted.
export async function readyAgain(signal) {
  do {
    await new Promise((resolve) => {
      setTimeout(resolve, EVERY_MS);
      signal.addEventListener("abort", resolve, { once: true });
    });
  } while (!signal.aborted && !(await readiness().catch(() => ({ ready: false }))).ready);
}

// Yields the chunks of a streamed response. Throws a Failure if the stream ends without [DONE].
//
// A server with a store keeps the answer under the `id`: `kept` of each chunk says so, and of the first one, which is
// nothing else and comes as soon as the server has taken the request. With `again`, the server is asked for what it has
// kept, and for the rest; if it has nothing, the request is sent anew.
export async function* stream(path, body, signal, { id, again = false }) {
  const known = again ? await reach(keptPath(id), { signal }) : null;
  const named = { ...headers(), "X-Conversation-Id": id };
  const answer = known?.ok ? known : await reach(path, { method: "POST", body, signal, headers: named });
  if (!answer.ok) throw await refusal(answer);
  yield { kept: answer === known || answer.headers.has("X-Conversation-Id") };
  for await (const block of pieces(answer.body, "\n\n")) {
    const [, number, data] = /^(id: .*\n)?data: (.*)$/.exec(block) ?? []; // else a comment that keeps the connection open
    if (data === undefined) continue;
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failure(chunk.error.message, { ...chunk.error, isLost: chunk.error.code === "shutdown" });
    // A seed has 64 bits and a JavaScript number 53, so the digits are read as text.
    if (chunk.choices?.[0]?.finish_reason) chunk.seed = /"seed":(\d+)/.exec(data)?.[1];
    yield { ...chunk, kept: number !== undefined };
  }
  throw lost("the stream broke off before its end");
}

const keptPath = (id) => `v1/stream?conv_id=${encodeURIComponent(id)}`;

// Deletes a kept answer, and ends it if the server is going on with it.
export function forget(id) {
  reach(keptPath(id), { method: "DELETE", keepalive: true }).catch(() => {});
}

// Yields the text of a body up to each end of a piece.
async function* pieces(body, end) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : lost("the connection was lost before the end");
    });
    if (done) return;
    const whole = (rest + value).split(end);
    rest = whole.pop();
    yield* whole;
  }
}
