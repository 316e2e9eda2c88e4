"""The messages of a worker to a frontend."""

import msgspec

from shared.messages.base import PROTOCOL_VERSION, Message, Outcome, Refusal
from shared.messages.status import Status


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
