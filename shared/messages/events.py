"""The messages of a worker to a frontend."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from shared.messages.requests import PROTOCOL_VERSION, Message, Outcome, Refusal, Role

# The state of a worker, which it broadcasts.

EXPECTED_TOKENS = 1024  # the most new tokens expected of an output, because few use all of their max_tokens


class WorkerState(StrEnum):
    """The state of a worker, as it reports it."""

    DOWNLOADING = "downloading"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Pages(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """K/V pages: `free + cached + owned = total`. A cached page is reusable and has no owner."""

    free: int = 0
    cached: int = 0
    owned: int = 0
    total: int = 0


class KVUsage(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Cache memory that layers of one kind use for all sequences. Pages of different kinds have different sizes."""

    kind: str  # "full": K/V of all positions; "window": of a sliding window; "state": one recurrent state per page
    owned: int = 0  # pages that sequences own
    total: int = 0  # pages of this kind
    bytes: int = 0  # bytes of the owned pages


def by_kind(usages: Iterable[KVUsage]) -> tuple[KVUsage, ...]:
    """Returns one KVUsage for each kind, with the sums of all entries of the kind."""
    kinds: dict[str, KVUsage] = {}
    for one in usages:
        before = kinds.get(one.kind, KVUsage(one.kind))
        kinds[one.kind] = KVUsage(
            one.kind, before.owned + one.owned, before.total + one.total, before.bytes + one.bytes
        )
    return tuple(kinds.values())


class PrefillBudget(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How much prefill fits into a step with decodes, from measured step times; zeros until a step is measured."""

    target_s: float = 0.0  # target duration of a step; 0 if there is no target
    prompt_tokens: int = 0  # prefill tokens allowed in a step
    decodes_s: float = 0.0  # time that the step's decodes take alone
    prompt_token_s: float = 0.0  # time added by each prefill token


class ConnectedFrontend(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A frontend that is connected to the worker."""

    id: str  # hexadecimal
    pid: int
    streams: int  # live requests, as of its latest Lease
    seq: int = 0  # sequence number of the next Step for this frontend; reveals the loss of the last Step


class CachedPrefixes(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Which prefixes the prefix cache has or will have soon, by their keys (shared/prefix_identity.py).

    A report has the changes since the last Status, and the next part of a sweep through all keys. Columns of keys are
    uint32. The part covers the positions `first` to `end` - 1 of the sweep, which has `total` positions.
    """

    came: bytes = b""
    went: bytes = b""
    check: int = 0  # xor of all keys after the changes of this report
    first: int = 0  # position of the part's first key; 0: a new sweep begins
    end: int = 0
    total: int = 0
    part: bytes = b""  # the keys at these positions, without those that have left the cache since the sweep began
    saved_tokens: int = 0  # estimate: prompt tokens among `expected_tokens` that the cache will probably have


class KVStoreTier(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A folder of --kv-store, and what this worker has done there since its start."""

    folder: str
    usable: bool = True  # False: it failed a moment ago, or hangs
    limit: int = 0  # bytes
    bytes: int = 0  # of all files, as of the last look
    hits: int = 0  # files that were read and used
    misses: int = 0  # prefixes of which no tier had more; counted at the last tier
    tokens: int = 0  # tokens of the files that were read
    read_bytes: int = 0
    read_s: float = 0.0
    written: int = 0  # files
    written_bytes: int = 0
    written_s: float = 0.0
    evictions: int = 0  # files that were removed to make room
    dropped: int = 0  # files that were not written, because the folder failed or did not keep up
    failures: int = 0  # operations that the system refused
    vanished: int = 0  # files that were gone when they were to be read
    torn: int = 0  # files that were cut off
    foreign: int = 0  # files of another model, layout or prefix
    corrupted: int = 0  # files with a wrong checksum


class Quantiles(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Quantiles of a measured time, in seconds; zeros before the first measurement."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class Status(Message, frozen=True):
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
    running: int = 0  # running sequences
    waiting: int = 0  # waiting sequences
    waiting_tokens: int = 0  # tokens of waiting sequences
    pages: Pages = Pages()
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens found in the prefix cache
    prompt_tokens_s: float = 0.0  # prompt tokens per second, over the last 10 s
    generation_tokens_s: float = 0.0
    ttft: Quantiles = Quantiles()
    itl: Quantiles = Quantiles()
    e2e: Quantiles = Quantiles()
    frontends: tuple[ConnectedFrontend, ...] = ()
    error: str = ""  # with FAILED: why the worker ends; its requests get no outcome, so frontends can resume them
    kernels: str = ""  # implementation: "triton", "c" or "torch"; "" while not known
    prefill_budget: PrefillBudget = PrefillBudget()
    draft_tokens: int = 0  # draft tokens computed
    accepted_tokens: int = 0  # draft tokens accepted
    kv_cache: tuple[KVUsage, ...] = ()  # memory use by kind of layers; `pages` describes the first kind
    prefix_cache_reset: int = 0  # the nonce of the latest ResetPrefixCache; 0: there was none
    batch_invariant: bool | None = None  # whether an answer depends on its request alone; None: not known yet
    ranks: tuple[int, ...] = ()  # process ids by rank, if several processes compute the model together
    drafted_at: tuple[int, ...] = ()  # draft tokens computed, by their position in the drafts of a step
    accepted_at: tuple[int, ...] = ()  # draft tokens accepted, by their position in the drafts of a step
    # tokens that all sequences may still need: uncomputed ones, and EXPECTED_TOKENS of output at most for each sequence
    expected_tokens: int = 0
    prefixes: CachedPrefixes = CachedPrefixes()  # set only in broadcasts of workers with a prefix cache
    prefill_tokens: int = 0  # prompt tokens computed
    sampled_tokens: int = 0
    steps: int = 0
    stages: int = 1  # stages of the pipeline; `ranks` lists stage after stage, equally many ranks for each
    kv_store: tuple[KVStoreTier, ...] = ()  # the folders of --kv-store
    role: Role = Role.BOTH
    page_size: int = 0  # tokens of a page of `pages`; 0: the worker does not say


class Limits(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The limits that a frontend checks requests against."""

    max_seq_len: int  # tokens of prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int = 0  # length of the vector that `Submit.pooling` asks for
    max_sequences: int = 0  # most sequences that can run and wait at once; 0: the worker does not say
    max_batch: int = 0  # most sequences that can run at once; 0: the worker does not say


class Welcome(Message, frozen=True):
    """Answers Hello on the frontend's own topic. The arrival of a Welcome proves that the subscription works."""

    nonce: int  # the nonce of the Hello
    epoch: int  # incarnation of the worker; rises with each restart
    pid: int
    model: str  # the served name
    tokenizer_hash: str  # sha256 of tokenizer.json
    limits: Limits
    version: int = PROTOCOL_VERSION
    seq: int = 0  # sequence number of the next Step for this frontend
    fingerprint: str = ""  # a hash of everything that decides the worker's bits; "": the worker makes none
    kv_space: str = ""  # workers with equal texts can read each other's files of the K/V store; "": it uses none
    kv_store_tokens: int = 0  # how many tokens' pages the K/V store has room for


class Admitted(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A Submit was admitted."""

    id: int
    seed: int  # the seed that the request is sampled with


class Rejected(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A Submit was not admitted."""

    id: int
    reason: Refusal
    message: str  # the text of the error that the client gets
    retry_after_s: float = 0.0


class Timings(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Times of a request, by the worker's clock."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    cached_tokens: int = 0  # tokens of prompt and earlier output (`Submit.generated`) found in the prefix cache
    drafts: tuple[int, int] = (0, 0)  # draft tokens that were computed, and how many of them were accepted


class Started(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Times of a request at its first token. A request that ends at a stop string gets no End with its times."""

    id: int
    timings: Timings


class End(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The last message about a request."""

    id: int
    outcome: Outcome
    tokens: int  # all output tokens of the request
    error: str = ""
    timings: Timings = Timings()
    predicted: tuple[int, int] | None = None  # drafts from Submit.prediction: (accepted, rejected)


class Logprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Log-probabilities of `count` consecutive tokens of one request, from offset `start`."""

    id: int
    start: int  # offset in the output, or in the prompt
    chosen: bytes  # packed float32 [count]
    top: int  # k, the number of most likely tokens
    top_ids: bytes  # packed uint32 [count * k], most likely first
    top_logprobs: bytes  # packed float32 [count * k]
    prompt: bool = False  # whether the tokens are the prompt's; the first prompt token has no log-probability
    ranks: bytes = b""  # ranks of the prompt's tokens by probability, from 1 on: packed uint32 [count]


class Pooled(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The vector that a Submit with `pooling` asked for. It comes in the frame of the request's End."""

    id: int
    values: bytes  # packed float32


class Step(Message, frozen=True):
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


Event = Welcome | Step | Status
