"""The price of a request: what it would cost in memory and time, computed before any message to a worker is made.

A field has a bound of its own, but each sequence of a request (`n` for each prompt) carries the same lists, samplers
and grammar. So each row of PRICES multiplies an amount by the number of sequences, and bounds the product. The worker
has bounds of its own (worker/engine/validation.py) against a frontend that sends anything.
"""

from collections.abc import Callable
from dataclasses import dataclass

from frontend.errors import Unprocessable
from frontend.request import GenerationRequest
from shared.messages import Sampling
from shared.messages.requests import ids_in_lists

PACKED = 16  # a packed id of a DRY breaker costs a sixteenth of an id in a list
LISTS: tuple[tuple[str, Callable[[Sampling], int]], ...] = (  # field, how many ids its list has
    ("logit_bias", lambda sampling: len(sampling.logit_bias)),
    ("allowed_token_ids", lambda sampling: len(sampling.allowed_token_ids)),
    ("bad_words", lambda sampling: sum(map(len, sampling.bad_words))),
    ("stop_token_ids", lambda sampling: len(sampling.stop_token_ids)),
    ("dry_sequence_breakers", lambda sampling: breaker_ids(sampling) // PACKED),
)


@dataclass(frozen=True, slots=True)
class Price:
    """One kind of cost. amount: of one sequence; most: of all sequences of a request together."""

    unit: str
    most: int
    amount: Callable[[Sampling], int]
    field: Callable[[Sampling], str]


def breaker_ids(sampling: Sampling) -> int:
    """Returns how many ids the breakers of DRY have."""
    dry = None if sampling.chain is None else sampling.chain.dry
    return 0 if dry is None else (len(dry.breakers) + sum([len(one.heads) for one in dry.long_breakers])) // 4


def _longest_list(sampling: Sampling) -> str:
    return max(LISTS, key=lambda row: row[1](sampling))[0]


PRICES = (
    # A worker decodes an id in 30 to 150 ns and keeps up to 120 bytes for it until the request runs.
    Price(
        "token ids in lists", 1 << 19, lambda sampling: ids_in_lists(sampling) + breaker_ids(sampling) // PACKED,
        _longest_list,
    ),
    # A sampler takes up to 20 ms for a row of 152,000 tokens.
    Price(
        "samplers", 1024, lambda sampling: 0 if sampling.chain is None else len(sampling.chain.order),
        lambda _: "samplers",
    ),
    Price("characters of grammar", 16 << 20, lambda sampling: len(sampling.grammar), lambda _: "tools"),
)  # fmt: skip


def check_price(request: GenerationRequest) -> None:
    """Raises Unprocessable, which names the field, if a request costs more than it may."""
    sampling = request.sampling
    if not (
        sampling.chain is not None or sampling.logit_bias or sampling.has_token_rules or sampling.stop_token_ids
        or sampling.grammar
    ):  # fmt: skip
        return
    count = len(request.prompts) * request.n
    for price in PRICES:
        each = price.amount(sampling)
        if each * count > price.most:
            param = price.field(sampling)
            raise Unprocessable(
                f"`{param}`: {each} {price.unit} in each of {count} answers are more than the {price.most} that a "
                "request may have in all",
                param=param, code="out_of_range",
            )  # fmt: skip
