"""The messages of a frontend to a worker."""

from typing import Annotated

import msgspec

from shared.messages.base import MAX_FEW_IDS, MAX_LIST_IDS, PROTOCOL_VERSION, U32, Message
from shared.messages.pictures import Picture
from shared.messages.sampling import Adapter, Pooling, Sampling


class Hello(Message, frozen=True):
    """Begins the handshake; the frontend repeats it until a Welcome with this nonce arrives on its topic."""

    nonce: int  # a number that the Welcome returns
    pid: int  # process id of the frontend, for logs
    version: int = PROTOCOL_VERSION
    host: str = ""  # host name of the frontend, for logs


class Lease(Message, frozen=True):
    """Heartbeat with a frontend's live requests. The worker frees them if no Lease arrives for `--lease-timeout`.

    A request with an id up to `last_id` that is not among `ids` has ended, even if its Abort was lost. Ids only grow
    (modulo 32 bits), so a Lease that arrives late is still true.
    """

    live: U32  # number of live requests
    last_id: U32 = 0  # id of the latest Submit to this worker; 0 if there is none or it is not reported
    ids: bytes = b""  # packed uint32: ids of the live requests


class Submit(Message, frozen=True):
    """One sequence to complete. `id` is unique within the frontend's lifetime and fits 32 bits.

    `generated` holds output that exists already, because a stream is resumed after its worker was lost, or because the
    client continues an answer. This output is prefilled, but neither sampled nor sent again.

    With `answer`, the output is recomputed without decoding: the ids of the answer are prefilled like a prompt, and an
    id is sampled at each of their positions. The output is what was sampled, up to the first id that differs from the
    answer, or to the end of the answer. Unless a stop token or a limit ends it at that point, its outcome is CHECKED.
    """

    id: U32
    prompt: bytes  # packed uint32
    sampling: Sampling
    generated: bytes = b""  # packed uint32
    cache_salt: str = ""  # text of a PrefixIdentity: only requests with equal texts share cached prefixes
    group: int = 0  # sequences of one prompt (n > 1) share a group id; 0 if the prompt has only this sequence
    deadline_ms: int = 0  # counted from the arrival of this message; 0 if there is no deadline
    priority: int = 0  # lower is scheduled first
    crashes: U32 = 0  # how many workers have died with this request in flight since its last token
    tenant: str = ""  # name of the API key that the request came with; the queue is fair between tenants
    original_id: U32 = 0  # id of the request's first Submit if another worker had it before; 0 if this is the first
    pooling: Pooling | None = None  # asks for a vector instead of text; `max_tokens` is then 0
    answer: bytes | None = None  # packed uint32: an answer to check (see the docstring)
    scored_from: U32 = 0  # `prompt_logprobs` are computed for the prompt's tokens from this index on
    adapter: Adapter | None = None  # the LoRA adapter of this sequence
    pictures: Annotated[list[Picture], msgspec.Meta(max_length=MAX_FEW_IDS)] | None = (
        None  # the prompt's pictures, in the order of their tokens
    )
    prediction: bytes | None = None  # packed uint32: the output that the client expects; its ids become drafts


class Abort(Message, frozen=True):
    """Ends requests. Idempotent; unknown ids are ignored."""

    ids: Annotated[tuple[U32, ...], msgspec.Meta(max_length=MAX_LIST_IDS)]


class Resync(Message, frozen=True):
    """Asks, after a gap, for the output of request `id` from `offset` on, and for its End if it has ended."""

    id: U32
    offset: U32


class ResetPrefixCache(Message, frozen=True):
    """Empties the prefix cache for requests that arrive later; running requests go on. Idempotent."""

    nonce: int  # Status returns the nonce when the cache has been emptied


Request = Hello | Lease | Submit | Abort | Resync | ResetPrefixCache
