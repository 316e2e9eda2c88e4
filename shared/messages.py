"""The wire protocol: all messages between frontends and workers.

Knows nothing of sockets, tokenizers or tensors. Two unions:

    Request = Hello | Lease | Submit | Abort | Resync | ResetPrefixCache      frontend -> worker  (DEALER -> ROUTER)
    Event   = Welcome | Step | Status                                         worker -> frontend  (XPUB -> SUB)

The XPUB socket may lose frames. So every event carries the worker's `epoch` (its incarnation), every `Step` carries a
sequence number `seq` per frontend, and every run of tokens carries its start offset in the request's output. A gap is
therefore detected at once and repaired by `Resync`, and a duplicate is harmless. Columns (`bytes`) are packed
little-endian (codec.py).
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import msgspec

PROTOCOL_VERSION = 2
TOPIC_BYTES = 8  # length of a frontend's id, which is the topic of its events
BROADCAST = bytes(TOPIC_BYTES)  # the topic of Status


U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]  # the decoder checks the range, because columns hold 32 bits


class Outcome(StrEnum):
    """How a request ended. Every admitted request gets exactly one outcome."""

    EOS = "eos"
    STOP = "stop"  # a stop token (found by the worker) or a stop string (found by the frontend, which then aborts)
    LENGTH = "length"
    POOLED = "pooled"  # what the request asked for instead of text was computed and sent
    ABORTED = "aborted"
    DEADLINE = "deadline"
    ERROR = "error"
    SHUTDOWN = "shutdown"


class WorkerState(StrEnum):
    """The state of a worker, as it reports it."""

    DOWNLOADING = "downloading"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Refusal(StrEnum):
    """Why a Submit was not admitted."""

    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    TOO_LONG = "context_length_exceeded"
    INVALID = "invalid"


class ThinkingBudget(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How many tokens an output may think before its reasoning is ended, and which ids begin and end reasoning."""

    tokens: int  # of reasoning, without the ids that open and close it
    opening: tuple[int, ...]
    closing: int
    forced: tuple[int, ...]  # what follows when the tokens are used up: `closing`, and what leads on to the answer
    begun: bool = False  # the output begins within reasoning
    blanks: tuple[int, ...] | None = ()  # ids that may precede the opening; None: reasoning may open at any place
    forbidden: tuple[tuple[int, ...], ...] = ()  # ids that may not follow each other once the tokens are used up


class Sampling(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How the tokens of a request are sampled, and when it ends. Each option has no effect at its default."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # unsigned 64 bit; None: the worker draws one and reports it in Admitted
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # k: send those of the chosen token and of the k most likely ones; None: send none
    prompt_logprobs: bool = False
    grammar: str = ""  # llguidance grammar that the output must match; empty: any output
    prompt_top: int = 0  # with `prompt_logprobs`: send those of at least so many of the most likely tokens
    allowed_token_ids: tuple[int, ...] = ()  # the output has no other ids; empty: all are allowed
    bad_words: tuple[tuple[int, ...], ...] = ()  # ids that may not follow each other in the output
    thinking: ThinkingBudget | None = None

    @property
    def has_token_rules(self) -> bool:
        """Whether ids are allowed or forbidden apart from a grammar."""
        return bool(self.allowed_token_ids or self.bad_words or self.thinking)

    @property
    def penalized(self) -> bool:
        """Whether tokens that occurred before are penalized."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)


class PoolingKind(StrEnum):
    """What is made of a prompt's hidden states, which are the output of the final norm."""

    LAST = "last"  # that of the last token
    MEAN = "mean"  # their mean
    FIRST = "first"  # that of the first token, which sentence-transformers calls cls
    LOGITS = "logits"  # the logits of some token ids after the last token


class Pooling(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Asks for one vector instead of text."""

    kind: PoolingKind
    normalized: bool = True  # divided by its length
    dimensions: int = 0  # only the first of them, before it is normalized; 0: all
    token_ids: tuple[int, ...] = ()  # of LOGITS; the rows of a classification head count as ids


class _Message(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Base of all messages: a tagged array. Fields may be added at the end, with a default."""


# frontend -> worker


class Hello(_Message):
    """Begins the handshake; the frontend repeats it until a Welcome with this nonce arrives on its topic."""

    nonce: int  # the Welcome returns it
    pid: int  # of the frontend, for logs
    version: int = PROTOCOL_VERSION
    host: str = ""  # of the frontend, for logs


class Lease(_Message):
    """Heartbeat that lists a frontend's live requests. Without one for `--lease-timeout`, the worker frees them all.

    A request with an id up to `last_id` that is not among `ids` has ended, even if its Abort was lost. Ids only grow
    (modulo 32 bits), so a Lease that arrives late is still true.
    """

    live: U32  # number of live requests
    last_id: U32 = 0  # id of the latest Submit to this worker; 0 if there is none or it is not reported
    ids: bytes = b""  # packed uint32: ids of the live requests


class Submit(_Message):
    """One sequence to complete. `id` is unique within the frontend's lifetime and fits 32 bits.

    `generated` holds the output already delivered when a stream is resumed after its worker was lost: it is prefilled,
    but neither sampled nor sent again.
    """

    id: U32
    prompt: bytes  # packed uint32
    sampling: Sampling
    generated: bytes = b""  # packed uint32
    cache_salt: str = ""  # only requests with equal salts share cached prefixes
    group: int = 0  # sequences of one prompt (n > 1) share a group id; 0 if the prompt has only this sequence
    deadline_ms: int = 0  # counted from the arrival of this message; 0 if there is no deadline
    priority: int = 0  # lower is scheduled first
    crashes: U32 = 0  # workers that died with this request in flight since its last token
    tenant: str = ""  # name of the API key that the request came with; the queue is fair between tenants
    original_id: U32 = 0  # id of the request's first Submit if another worker had it before; 0 if this is the first
    pooling: Pooling | None = None  # asks for a vector; `max_tokens` is then 0


class Abort(_Message):
    """Ends requests. Idempotent; unknown ids are ignored."""

    ids: tuple[U32, ...]


class Resync(_Message):
    """Asks, after a gap, for the output of request `id` from `offset` on, and for its End if it has ended."""

    id: U32
    offset: U32


class ResetPrefixCache(_Message):
    """Empties the prefix cache for requests that arrive later; running ones go on. Idempotent."""

    nonce: int  # Status returns it when it is done


# worker -> frontend


class Limits(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The limits that a frontend checks requests against."""

    max_seq_len: int  # tokens of prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int = 0  # numbers in a vector that `pooling` asks for


class Welcome(_Message):
    """Answers Hello on the frontend's own topic; its arrival proves that the subscription works."""

    nonce: int  # of the Hello
    epoch: int  # incarnation of the worker; rises with each restart
    pid: int
    model: str  # the served name
    tokenizer_hash: str  # sha256 of tokenizer.json
    limits: Limits
    version: int = PROTOCOL_VERSION
    seq: int = 0  # sequence number of the next Step for this frontend


class Admitted(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A Submit was admitted."""

    id: int
    seed: int  # the seed that the request is sampled with


class Rejected(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A Submit was not admitted."""

    id: int
    reason: Refusal
    message: str  # for the client
    retry_after_s: float = 0.0


class Timings(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Times of a request, by the worker's clock."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache


class Started(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Times of a request at its first token, for requests that the frontend ends at a stop string."""

    id: int
    timings: Timings


class End(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The last message about a request."""

    id: int
    outcome: Outcome
    tokens: int  # output tokens in all
    error: str = ""
    timings: Timings = Timings()


class Logprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Log-probabilities of `count` consecutive tokens of one request, from offset `start`."""

    id: int
    start: int  # offset in the output, or in the prompt
    chosen: bytes  # packed float32 [count]
    top: int  # k, the number of most likely tokens
    top_ids: bytes  # packed uint32 [count * k], most likely first
    top_logprobs: bytes  # packed float32 [count * k]
    prompt: bool = False  # whether the tokens are the prompt's; the first prompt token has no log-probability
    ranks: bytes = b""  # of the prompt's tokens among all tokens, from 1 on: packed uint32 [count]


class Pooled(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The vector that a Submit with `pooling` asked for. It comes in the frame of the request's End."""

    id: int
    values: bytes  # packed float32


class Step(_Message):
    """All output of one step for one frontend: one frame in columns, instead of a message for each request.

    Request `ids[i]` got `counts[i]` tokens starting at output offset `starts[i]`; `tokens` holds all of them
    one after another. A request's `End` comes in the frame of its last token or later, never before.
    """

    epoch: int
    seq: int  # sequence number of this frame among the frames for the frontend
    ids: bytes = b""  # packed uint32
    starts: bytes = b""  # packed uint32
    counts: bytes = b""  # packed uint32
    tokens: bytes = b""  # packed uint32
    admitted: tuple[Admitted, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    ends: tuple[End, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    started: tuple[Started, ...] = ()
    unknown: tuple[int, ...] = ()  # ids from Resyncs that the worker does not know; the frontend submits them again
    pooled: tuple[Pooled, ...] = ()


class Pages(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """K/V pages: `free + cached + owned = total`. A cached page is reusable and has no owner."""

    free: int = 0
    cached: int = 0
    owned: int = 0
    total: int = 0


class KVUsage(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What the layers of one kind keep of all sequences. Pages of different kinds have different sizes."""

    kind: str  # "full": all positions; "window": those of a sliding window; "state": recurrent states, each in a page
    owned: int = 0  # pages that sequences own
    total: int = 0  # pages
    bytes: int = 0  # of the owned pages


def by_kind(usages: Iterable[KVUsage]) -> tuple[KVUsage, ...]:
    """Returns each kind once, with its sums."""
    kinds: dict[str, KVUsage] = {}
    for one in usages:
        before = kinds.get(one.kind, KVUsage(one.kind))
        kinds[one.kind] = KVUsage(
            one.kind, before.owned + one.owned, before.total + one.total, before.bytes + one.bytes
        )
    return tuple(kinds.values())


class PrefillBudget(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How much prefill fits into a step that contains decodes, from measured step times; zero until one is measured."""

    target_s: float = 0.0  # target duration of a step; 0 if there is no target
    prompt_tokens: int = 0  # prefill tokens allowed in a step
    decodes_s: float = 0.0  # time that the step's decodes take alone
    prompt_token_s: float = 0.0  # time added by each prefill token


class ConnectedFrontend(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A frontend that is connected to the worker."""

    id: str  # hexadecimal
    pid: int
    streams: int  # live requests, as of its latest Lease
    seq: int = 0  # sequence number of the next Step for it, by which the frontend notices that the last one was lost


class Quantiles(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Quantiles in seconds; zero until something was measured."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class Status(_Message):
    """State of the worker, broadcast at least every 250 ms, also during a step. /ready and /stats show it."""

    epoch: int
    pid: int
    model: str
    device: str
    dtype: str
    state: WorkerState
    progress: float = 1.0  # progress of DOWNLOADING or LOADING, from 0 to 1
    seq: int = 0
    max_seq_len: int = 0
    last_step_age_s: float = 0.0  # seconds since the compute loop made progress: an iteration, or a layer of a step
    running: int = 0  # sequences
    waiting: int = 0  # sequences
    waiting_tokens: int = 0  # tokens of waiting sequences
    pages: Pages = Pages()
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens found there
    prompt_tokens_s: float = 0.0  # per second, over the last 10 s
    generation_tokens_s: float = 0.0
    ttft: Quantiles = Quantiles()
    itl: Quantiles = Quantiles()
    e2e: Quantiles = Quantiles()
    frontends: tuple[ConnectedFrontend, ...] = ()
    error: str = ""  # with state FAILED: why the worker ends; its requests get no outcome, so that they can be resumed
    kernels: str = ""  # implementation: "triton", "c" or "torch"; "" while not known
    prefill_budget: PrefillBudget = PrefillBudget()
    draft_tokens: int = 0  # draft tokens computed
    accepted_tokens: int = 0  # draft tokens accepted
    kv_cache: tuple[KVUsage, ...] = ()  # by kind of layers; `pages` are those of the first kind
    prefix_cache_reset: int = 0  # the nonce of the latest ResetPrefixCache; 0: there was none


Request = Hello | Lease | Submit | Abort | Resync | ResetPrefixCache
Event = Welcome | Step | Status
