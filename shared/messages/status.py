"""The state of a worker, which it broadcasts."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from shared.messages.base import Message

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
    part: bytes = b""  # the keys at first .. end-1, without keys that have gone since the sweep began
    saved_tokens: int = 0  # estimate: prompt tokens among `expected_tokens` that the cache will probably have


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
