"""The wire's vocabulary: everything a frontend and a worker ever say to each other.

Knows nothing of sockets, tokenizers or tensors. Two unions:

    Request = Hello | Lease | Submit | Abort | Resync      frontend -> worker  (DEALER -> ROUTER)
    Event   = Welcome | Step | Status                      worker -> frontend  (XPUB -> SUB)

PUB is lossy by design, so every event names the worker's `epoch` (which incarnation of the worker speaks),
every `Step` a per-frontend `seq`, and every run of tokens its start offset in the request's output: a gap is
seen at once, a duplicate is harmless, and `Resync` repairs. Columns (`bytes`) are packed little-endian, see codec.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

PROTOCOL_VERSION = 2
TOPIC_BYTES = 8  # a frontend's id is its topic
BROADCAST = bytes(TOPIC_BYTES)  # the topic of Status


U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]  # what a decoder lets through; columns hold no others


class Outcome(StrEnum):
    """How a request ended; every admitted request gets exactly one."""

    EOS = "eos"
    STOP = "stop"  # a stop token id (worker) or a stop string (found by the frontend, which then aborts)
    LENGTH = "length"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    ERROR = "error"
    SHUTDOWN = "shutdown"


class WorkerState(StrEnum):
    """What a worker is doing."""

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


class Sampling(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How one request's tokens are chosen and when it ends. Zero or None switches a part off."""

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
    logprobs: int | None = None  # None: none; k: the chosen token's and the k most likely ones'
    prompt_logprobs: bool = False
    grammar: str = ""  # what the output must match, in llguidance's words; empty: anything

    @property
    def penalized(self) -> bool:
        """Whether tokens count for less for having been there before."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)


class _Message(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Base of all messages: a tagged array, so that fields may be added at the end with a default."""


# frontend -> worker


class Hello(_Message):
    """Introduces a frontend; repeated until a Welcome with this nonce arrives on the frontend's topic."""

    nonce: int
    pid: int
    version: int = PROTOCOL_VERSION
    host: str = ""


class Lease(_Message):
    """Heartbeat: which requests this frontend owns. Silence for a few seconds frees them all.

    A request with an id up to `last_id` that is not among `ids` is over, whatever became of its Abort; ids only grow
    (around 32 bits), so a Lease that comes late says nothing that was not true for ever.
    """

    live: U32
    last_id: U32 = 0  # the last id submitted to this worker; 0: none, or a frontend that does not say
    ids: bytes = b""  # packed uint32


class Submit(_Message):
    """One sequence to complete. `id` is unique within the frontend's lifetime and fits 32 bits.

    `generated` is not empty when a stream goes on after a worker was lost: output already delivered, which
    is computed over but neither sent again nor sampled again.
    """

    id: U32
    prompt: bytes  # packed uint32
    sampling: Sampling
    generated: bytes = b""  # packed uint32
    cache_salt: str = ""  # only requests with equal salts share cached prefixes
    group: int = 0  # sequences of one prompt (n > 1) share a group id, 0: none
    deadline_ms: int = 0  # from arrival; 0: none
    priority: int = 0  # lower goes first
    crashes: U32 = 0  # how many workers died with this request in flight since its last token
    tenant: str = ""  # name of the API key it came with; the queue is fair between tenants
    original_id: U32 = 0  # id of its first Submit if it was with another worker before; 0: this is its first


class Abort(_Message):
    """Ends requests; idempotent; unknown ids are ignored."""

    ids: tuple[U32, ...]


class Resync(_Message):
    """Asks for the output of `id` again from `offset` on, and for its end if it ended: something of it was missed."""

    id: U32
    offset: U32


# worker -> frontend


class Limits(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a frontend must know to validate requests."""

    max_seq_len: int  # tokens, prompt + output
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Welcome(_Message):
    """Answers Hello on the frontend's own topic, so that its arrival proves the subscription works."""

    nonce: int
    epoch: int
    pid: int
    model: str  # the served name
    tokenizer_hash: str  # sha256 of tokenizer.json
    limits: Limits
    version: int = PROTOCOL_VERSION
    seq: int = 0  # of the next Step for this frontend


class Admitted(msgspec.Struct, frozen=True, gc=False, array_like=True):
    id: int
    seed: int


class Rejected(msgspec.Struct, frozen=True, gc=False, array_like=True):
    id: int
    reason: Refusal
    message: str
    retry_after_s: float = 0.0


class Timings(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where a request's time went, by the worker's clock."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache


class Started(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Comes with a request's first token: what is known by then, for those that end before the worker ends them."""

    id: int
    timings: Timings


class End(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The one terminal message of a request."""

    id: int
    outcome: Outcome
    tokens: int  # output tokens in all, the last one included
    error: str = ""
    timings: Timings = Timings()


class Logprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Log-probabilities of `count` consecutive tokens of one request, from offset `start`.

    `prompt` is true for the prompt's own tokens (offsets in the prompt, the first token has none).
    """

    id: int
    start: int
    chosen: bytes  # packed float32 [count]
    top: int  # k
    top_ids: bytes  # packed uint32 [count * k], most likely first
    top_logprobs: bytes  # packed float32 [count * k]
    prompt: bool = False


class Step(_Message):
    """Everything one frontend learns from one step: one frame, in columns, never one message a request.

    Request `ids[i]` got `counts[i]` tokens starting at output offset `starts[i]`; `tokens` holds all of them
    one after another. A request's `End` comes in the frame of its last token or later, never before.
    """

    epoch: int
    seq: int
    ids: bytes = b""  # packed uint32
    starts: bytes = b""  # packed uint32
    counts: bytes = b""  # packed uint32
    tokens: bytes = b""  # packed uint32
    admitted: tuple[Admitted, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    ends: tuple[End, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    started: tuple[Started, ...] = ()
    unknown: tuple[int, ...] = ()  # asked for by a Resync, but nothing is known of them: submit them again


class Pages(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """`free + cached + owned = total`; a cached page is reusable and owned by nobody."""

    free: int = 0
    cached: int = 0
    owned: int = 0
    total: int = 0


class PrefillBudget(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a step in which something decodes is planned with; zero while nothing was measured."""

    target_s: float = 0.0  # that it shall last; 0: never mind
    prompt_tokens: int = 0  # that it may have
    decodes_s: float = 0.0  # that its decodes take alone
    prompt_token_s: float = 0.0  # that a prompt token adds


class ConnectedFrontend(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A frontend as the worker sees it."""

    id: str  # hexadecimal
    pid: int
    streams: int
    seq: int = 0  # of the next Step for it: shows a frontend that the last one was lost


class Quantiles(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Seconds; zero while nothing was measured."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class Status(_Message):
    """Broadcast at least every 250 ms, even while a step runs; readiness and /stats are read from it."""

    epoch: int
    pid: int
    model: str
    device: str
    dtype: str
    state: WorkerState
    progress: float = 1.0  # of downloading, or loading, 0 to 1
    seq: int = 0
    max_seq_len: int = 0
    last_step_age_s: float = 0.0  # since the compute loop last proved itself: by a turn, or by a layer of a step
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    pages: Pages = Pages()
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    prompt_tokens_s: float = 0.0  # over the last 10 s
    generation_tokens_s: float = 0.0
    ttft: Quantiles = Quantiles()
    itl: Quantiles = Quantiles()
    e2e: Quantiles = Quantiles()
    frontends: tuple[ConnectedFrontend, ...] = ()
    error: str = ""  # with state FAILED: why the worker ends, without having told any request that it failed
    kernels: str = ""  # what computes: "triton", "c" or "torch"; "" while that is not known
    pace: PrefillBudget = PrefillBudget()
    draft_tokens: int = 0  # guessed
    accepted_tokens: int = 0  # of those, what came


Request = Hello | Lease | Submit | Abort | Resync
Event = Welcome | Step | Status
