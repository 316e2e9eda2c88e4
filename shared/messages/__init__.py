"""The wire protocol: all messages between frontends and workers.

Knows nothing of sockets, tokenizers or tensors. Each direction has a union of its messages:

    Request = Hello | Lease | Submit | Abort | Resync | ResetPrefixCache      frontend -> worker  (DEALER -> ROUTER)
    Event   = Welcome | Step | Status                                         worker -> frontend  (XPUB -> SUB)

The XPUB socket may lose frames. So every event carries the worker's `epoch` (its incarnation), every `Step` carries a
sequence number `seq` per frontend, and every run of tokens carries its start offset in the request's output. So the
next frame shows a gap, which `Resync` repairs, and a duplicate is harmless. Columns (`bytes`) are packed little-endian
(shared/wire.py).

requests.py has the messages of a frontend and the records in them (sampling, images, adapters), events.py those of a
worker.
"""

from shared.messages.events import (
    EXPECTED_TOKENS,
    Admitted,
    CachedPrefixes,
    ConnectedFrontend,
    End,
    Event,
    KVStoreTier,
    KVUsage,
    Limits,
    Logprobs,
    Pages,
    Pooled,
    PrefillBudget,
    Quantiles,
    Rejected,
    Started,
    Status,
    Step,
    Timings,
    Welcome,
    WorkerState,
    by_kind,
)
from shared.messages.requests import (
    BROADCAST,
    PROTOCOL_VERSION,
    TOPIC_BYTES,
    U32,
    Abort,
    Adapter,
    Dry,
    Hello,
    Lease,
    Outcome,
    Pooling,
    PoolingKind,
    Prefill,
    PromptImage,
    Refusal,
    Request,
    ResetPrefixCache,
    Resync,
    Role,
    SamplerChain,
    Sampling,
    Submit,
    ThinkingBudget,
    WindowPenalties,
)

__all__ = [
    "BROADCAST",
    "EXPECTED_TOKENS",
    "PROTOCOL_VERSION",
    "TOPIC_BYTES",
    "U32",
    "Abort",
    "Adapter",
    "Admitted",
    "CachedPrefixes",
    "ConnectedFrontend",
    "Dry",
    "End",
    "Event",
    "Hello",
    "KVStoreTier",
    "KVUsage",
    "Lease",
    "Limits",
    "Logprobs",
    "Outcome",
    "Pages",
    "Pooled",
    "Pooling",
    "PoolingKind",
    "Prefill",
    "PrefillBudget",
    "PromptImage",
    "Quantiles",
    "Refusal",
    "Rejected",
    "Request",
    "ResetPrefixCache",
    "Resync",
    "Role",
    "SamplerChain",
    "Sampling",
    "Started",
    "Status",
    "Step",
    "Submit",
    "ThinkingBudget",
    "Timings",
    "Welcome",
    "WindowPenalties",
    "WorkerState",
    "by_kind",
]
