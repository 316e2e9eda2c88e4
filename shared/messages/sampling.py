"""What a request asks of the worker: tokens, with their sampling options, or a vector."""

from enum import StrEnum
from typing import Annotated

import msgspec

from shared.messages.base import MAX_LIST_IDS, FewIds, Ids, IdSequences
from shared.messages.samplers import SamplerChain


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
    LOGITS = "logits"  # the logits of some token ids after the last token


class Pooling(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Asks for one vector instead of text."""

    kind: PoolingKind
    normalized: bool = True  # whether the vector is divided by its Euclidean length
    dimensions: int = 0  # keep only the first `dimensions` numbers, before normalization; 0: all
    token_ids: FewIds = ()  # the ids for LOGITS; the rows of a classification head count as ids

    @property
    def needs_first_rows(self) -> bool:
        """Whether the vector needs the rows of the first tokens, so that no cached prefix can replace them."""
        return self.kind in (PoolingKind.MEAN, PoolingKind.FIRST)


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
