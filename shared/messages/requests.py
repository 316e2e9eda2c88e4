"""The messages of a frontend to a worker."""

from enum import StrEnum
from typing import Annotated

import msgspec

# Types that the messages of both directions share.

PROTOCOL_VERSION = 5
TOPIC_BYTES = 8  # length of a frontend's id, which is the topic of its events
BROADCAST = bytes(TOPIC_BYTES)  # the topic of Status, to which every frontend subscribes
U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]  # columns hold 32 bits, so the decoder checks the range
# Lists of ids in a message. The decoder refuses a longer list before it makes any of its elements, of which one takes
# up to 120 bytes. No vocabulary has more ids.
MAX_LIST_IDS = 1 << 19
MAX_FEW_IDS = 4096
Ids = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LIST_IDS)]
FewIds = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_FEW_IDS)]
IdSequences = Annotated[tuple[FewIds, ...], msgspec.Meta(max_length=MAX_FEW_IDS)]


class Outcome(StrEnum):
    """How a request ended. Every admitted request gets exactly one outcome."""

    EOS = "eos"
    STOP = "stop"  # a stop token (found by the worker) or a stop string (found by the frontend, which then aborts)
    LENGTH = "length"
    POOLED = "pooled"  # the vector that the request asked for instead of text was sent
    CHECKED = "checked"  # `Submit.answer` was recomputed to its end, or to the first id that differs
    ABORTED = "aborted"
    DEADLINE = "deadline"
    DEAD_END = "dead_end"  # the request's grammar or token rules allow no further token, or cost too much
    ERROR = "error"
    SHUTDOWN = "shutdown"


class Refusal(StrEnum):
    """Why a Submit was not admitted."""

    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    TOO_LONG = "context_length_exceeded"
    INVALID = "invalid"


class Message(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Base of all messages: a tagged array. Fields may be added at the end, with a default."""


# A chain of samplers, with llama.cpp's names; it replaces `Sampling`'s temperature, top-k, top-p and min-p.


class WindowPenalties(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Penalties on the tokens that occur among the last `last_n` tokens of prompt and output."""

    last_n: int  # -1: all tokens
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


class LongBreaker(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A sequence of ids that ends a repetition: one of `heads`, followed by all ids of `tail`."""

    heads: bytes  # packed uint32 ids
    tail: FewIds


class Dry(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The penalty on tokens that would extend a repetition ("Don't Repeat Yourself")."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int  # DRY looks for repetitions in the last `last_n` tokens of prompt and output; -1: all
    breakers: bytes = b""  # packed ids in ascending order, each of which ends a repetition
    long_breakers: Annotated[tuple[LongBreaker, ...], msgspec.Meta(max_length=MAX_FEW_IDS)] = ()


class SamplerChain(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Applies the samplers of `order`, one after another. An option has no effect at its default.

    The token is drawn from what the chain leaves; `Sampling`'s temperature is then 1, its top-k, top-p, min-p are off.
    """

    order: Annotated[
        tuple[str, ...], msgspec.Meta(max_length=MAX_FEW_IDS)
    ]  # names from worker/model_runner/sampler_chain.py
    temperature: float = 1.0  # 0 leaves only the most likely token
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 0  # top_p, min_p, typical_p and xtc leave at least this many tokens
    penalties: WindowPenalties | None = None
    dry: Dry | None = None
    mirostat: int = 0  # version of Mirostat, 1 or 2, applied after the samplers of `order`; 0: off
    mirostat_tau: float = 5.0  # Mirostat's target surprise, in bits
    mirostat_eta: float = 0.1  # Mirostat's learning rate: how fast its bound on the surprise moves
    reports: bool = False  # whether the log-probabilities of the output are those after the chain

    @property
    def reads_tokens(self) -> bool:
        """Whether the result depends on earlier tokens, not only on the logits."""
        return self.penalties is not None or self.dry is not None or self.mirostat > 0


# What a request asks of the worker: tokens, with their sampling options, or a vector.


class ThinkingBudget(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The number of reasoning tokens after which the worker ends the reasoning, and the ids that begin and end it."""

    tokens: int  # most reasoning tokens, without the ids that open and close the reasoning
    opening: FewIds
    closing: int
    forced: FewIds  # ids forced when `tokens` are used up: `closing`, then ids that introduce the answer
    begun: bool = False  # whether the prompt ends, and the output begins, inside reasoning
    blanks: Ids | None = ()  # ids that may precede the opening; None: reasoning may open at any place
    forbidden: IdSequences = ()  # sequences of ids that must not occur once `tokens` are used up


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
    stop_token_ids: FewIds = ()
    ignore_eos: bool = False
    logit_bias: Annotated[tuple[tuple[int, float], ...], msgspec.Meta(max_length=MAX_LIST_IDS)] = ()
    logprobs: int | None = None  # k: send log-probabilities of the chosen token and the k most likely; None: none
    prompt_logprobs: bool = False
    grammar: str = ""  # llguidance grammar that the output must match; empty: any output
    prompt_top: int = 0  # with `prompt_logprobs`: the least number of most likely tokens to send for each position
    allowed_token_ids: Ids = ()  # only these ids may occur in the output; empty: all may
    bad_words: IdSequences = ()  # sequences of ids that must not occur in the output
    thinking: ThinkingBudget | None = None
    chain: SamplerChain | None = None

    @property
    def has_token_rules(self) -> bool:
        """Whether the request allows or forbids ids by other means than a grammar."""
        return bool(self.allowed_token_ids or self.bad_words or self.thinking)

    @property
    def penalized(self) -> bool:
        """Whether tokens that occurred before are penalized."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)


def ids_in_lists(sampling: Sampling) -> int:
    """Returns how many token ids the lists of a request have, which each of its sequences carries."""
    return (
        len(sampling.logit_bias) + len(sampling.allowed_token_ids) + len(sampling.stop_token_ids)
        + sum(map(len, sampling.bad_words))
    )  # fmt: skip


class PoolingKind(StrEnum):
    """How a vector is made of a prompt's hidden states, which are the output of the final norm."""

    LAST = "last"  # the hidden state of the last token
    MEAN = "mean"  # the mean of the hidden states
    FIRST = "first"  # the hidden state of the first token; sentence-transformers calls this cls
    MAX = "max"  # the largest of the hidden states, for each of their elements
    TOKENS = "tokens"  # the hidden states of all tokens, one after another, each as a vector of its own
    LOGITS = "logits"  # the logits of some token ids after the last token
    LOGPROBS = "logprobs"  # the log-probabilities of some token ids after the last token, and the most likely id


class Pooling(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Asks for one vector instead of text."""

    kind: PoolingKind
    normalized: bool = True  # whether the vector is divided by its Euclidean length
    dimensions: int = 0  # keep only the first `dimensions` numbers, before normalization; 0: all
    token_ids: FewIds = ()  # the ids for LOGITS and LOGPROBS; the rows of a classification head count as ids

    @property
    def needs_first_rows(self) -> bool:
        """Whether the vector needs the rows of the first tokens, so that no cached prefix can replace them."""
        return self.kind in (PoolingKind.MEAN, PoolingKind.FIRST, PoolingKind.MAX, PoolingKind.TOKENS)


class Adapter(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A LoRA adapter: its name for clients, its folder, and the hash that its files must have."""

    name: str
    path: str
    sha256: str
    scale: float = 1.0  # a factor for all products of the adapter

    @property
    def identity(self) -> str:
        """Text of everything that decides the adapter's bits: the hash, and the scale unless it is 1."""
        return self.sha256 if self.scale == 1.0 else f"{self.sha256}*{self.scale!r}"

    @property
    def unscaled(self) -> "Adapter":
        return self if self.scale == 1.0 else msgspec.structs.replace(self, scale=1.0)


# A picture of a prompt, ready for a vision encoder.


class Picture(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One input of the vision encoder: a picture, or one tile of it."""

    start: int  # index of the picture's first placeholder token in the prompt
    tokens: int  # number of placeholder tokens of the picture, which have no gap between them
    height: int  # in pixels, after resizing: the size that the encoder sees
    width: int
    pixels: bytes  # uint8 RGB, height x width x 3, row by row
    digest: bytes  # sha256 over (height, width, pixels): 32 bytes


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
    second_from: U32 = 0  # where the second text of a pair begins, for encoders that tell texts apart; 0: one text


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
