"""The fields of llama.cpp's samplers, by its names, as types. Each format says which of them it has."""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from frontend.api.requests.request_model import LARGEST, MOST, FieldError

LETTERS = {  # of samplers
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "i": "infill",
}  # fmt: skip
PLAIN = ("penalties", "temperature", "top_k", "top_p", "min_p")  # what works without a chain, in this order
MAX_BREAKERS, MAX_BREAKER_CHARS = 16, 40
BREAKERS = ("\n", ":", '"', "*")  # of DRY, if a request names none
FIELDS = (
    "samplers", "min_keep", "repeat_last_n", "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold",
    "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
)  # fmt: skip


def _told(description: str) -> Meta:
    return Meta(description=description)


_Share = Annotated[float, Meta(ge=0, le=1)]
_Number = Annotated[float, Meta(ge=0, le=1e6)]
_Count = Annotated[int, Meta(ge=0, le=MOST)]
_Window = Annotated[int, Meta(ge=-1, le=MOST)]
_Breaker = Annotated[str, Meta(min_length=1, max_length=MAX_BREAKER_CHARS)]
# What these may be is checked below: msgspec 0.22 crashes at exit where two types share a pattern in such a union.
_Sampler = Annotated[str, Meta(extra_json_schema={"enum": [*LETTERS.values()]})]
_Letters = Annotated[str, Meta(extra_json_schema={"pattern": f"^[{''.join(LETTERS)}]*$"})]

Samplers = Annotated[
    Annotated[list[_Sampler], Meta(max_length=16)] | _Letters | None,
    _told(f"Names, or letters of `{''.join(LETTERS)}`: these work in this order, the others are off"),
]
MinKeep = Annotated[_Count | None, _told("`typical_p`, `top_p`, `min_p` and XTC keep at least so many tokens")]
RepeatLastN = Annotated[
    _Window | None,
    _told("The penalties see only so many of the last tokens, of the prompt and the answer; 0: they are off; -1: all"),
]
TopNSigma = Annotated[
    Annotated[float, Meta(ge=-LARGEST, le=LARGEST)] | None,
    _told("Draw from tokens at most so many standard deviations below the highest logit; 0 and less: from all"),
]
TypicalP = Annotated[
    _Share | None, _told("Draw from the most typical tokens that together have this probability; 1: from all")
]
XtcProbability = Annotated[
    _Share | None, _told("How often XTC drops all tokens above its threshold but the least likely of them")
]
XtcThreshold = Annotated[_Share | None, _told("A probability, 0.1 by default; above 0.5: XTC is off")]
DynatempRange = Annotated[
    _Number | None, _told("How far the temperature is lower or higher, as the entropy of the next token is")
]
DynatempExponent = Annotated[_Number | None, _told("Of the entropy, 1 by default")]
Mirostat = Annotated[
    Annotated[int, Meta(ge=0, le=2)] | None,
    _told("1 or 2: keep the surprise of tokens near a target; other samplers but the temperature are then off"),
]
MirostatTau = Annotated[_Number | None, _told("The target of Mirostat in bits, 5 by default")]
MirostatEta = Annotated[_Number | None, _told("How fast Mirostat learns, 0.1 by default")]
DryMultiplier = Annotated[
    _Number | None, _told("Above 0: DRY subtracts so much from the logits of tokens that would go on a repetition")
]
DryBase = Annotated[
    Annotated[float, Meta(ge=1, le=1e6)] | None,
    _told("How much DRY grows with each token of the repetition, 1.75 by default"),
]
DryAllowedLength = Annotated[_Count | None, _told("Shorter repetitions are free, 2 by default")]
DryPenaltyLastN = Annotated[
    _Window | None, _told("DRY looks for repetitions in so many of the last tokens; 0: it is off; -1: in all")
]
DrySequenceBreakers = Annotated[
    Annotated[list[_Breaker], Meta(max_length=MAX_BREAKERS)] | None,
    _told('Texts that no repetition goes beyond; `["\\n", ":", "\\"", "*"]` by default'),
]


def ordered(samplers: Sequence[str]) -> list[str]:
    """Returns the names in a `samplers` field, which is a list of them or a string of letters, each once."""
    names = [LETTERS[letter] for letter in samplers] if isinstance(samplers, str) else samplers
    return list(dict.fromkeys(names))


def check_samplers(request: Any) -> None:
    """Raises FieldError for a name or a letter that is no sampler."""
    known = LETTERS.keys() if isinstance(request.samplers, str) else LETTERS.values()
    if unknown := [one for one in request.samplers or () if one not in known]:
        raise FieldError("samplers", f"has no {unknown[0]!r:.80}; there are {', '.join(LETTERS.values())}")
