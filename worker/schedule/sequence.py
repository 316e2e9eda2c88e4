"""A request inside the worker, as a few counts; the states of a request are questions asked of them."""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from shared.messages import Sampling
from worker.schedule.ngram import NgramDrafter

Key = tuple[bytes, int]  # (frontend id, request id)


class Constraint(Protocol):
    """What a sequence's output must keep to, and how far it has come in it; `worker/grammar` makes them."""

    def advance(self, token: int) -> bool:
        """Called once for each committed token; False: the token does not fit, and `error` says why."""

    @property
    def ended(self) -> bool:
        """Nothing more may follow."""

    @property
    def error(self) -> str: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is prompt + output; `computed_tokens` of them have K/V in `pages`; the rest is what is still to do.

    waiting: no pages and not running; prefill: more than one token behind; decode: exactly one behind.
    """

    # what was asked
    key: Key
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    seed: int
    arrival: float  # seconds, the loop's clock
    cache_salt: str = ""  # only sequences with the same one share cached prefixes
    group: int = 0  # sequences of one prompt have the same, see queue.py; 0: it is alone
    priority: int = 0  # lower goes first
    deadline: float = float("inf")  # seconds, the loop's clock
    tenant: str = ""  # the name of its API key, see turns.py

    # how far it is
    computed_tokens: int = 0  # tokens with K/V, all steps under way apart
    in_flight_tokens: int = 0  # tokens after those, which steps under way compute
    pending_outputs: int = 0  # ids that these steps sample at least, which nobody knows yet
    constraint: Constraint | None = None
    drafter: NgramDrafter | None = None  # once it may have had drafts, see drafting.py
    plain: bool = False  # known to be sampled from its logits alone, see run/sampler.py

    # what it holds
    pages: "array[int]" = field(default_factory=lambda: array("i"))  # of C ints, which pack.py copies whole
    digests: list[bytes] = field(default_factory=list)  # of its tokens' full pages, see memory/prefix.py
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    charged_tokens: int = 0  # of its tokens, how many are on its owner's account, see turns.py

    # what it has met
    admitted: float = 0.0  # when it first got pages
    first_token: float = 0.0  # when its first token was committed
    last_token: float = 0.0  # when its latest one was
    preemptions: int = 0
    preempted_for: bool = False  # running sequences were already preempted to admit it
    crashes: int = 0  # of workers, that it is suspected of, see ledger.py
    resumed: bool = False  # it was admitted by a worker that is gone
    original_id: int = 0  # its request id at its first worker; 0: this is its first

    @property
    def original_key(self) -> Key:
        """The key it had at its first worker."""
        return self.key[0], self.original_id or self.key[1]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def next_output(self) -> int:
        """Which output token the next step samples, counted from 0."""
        return len(self.tokens) - self.prompt_len + self.pending_outputs

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens without K/V; the step that brings this to zero samples the next one."""
        return len(self.tokens) - self.computed_tokens
