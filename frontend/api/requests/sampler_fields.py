"""The fields of the samplers that only llama.cpp has: their types, and the sampler names in `samplers`."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from frontend.api.requests.request_model import LARGEST, MOST, SMALLEST, FieldError

LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "i": "infill",
}  # fmt: skip
OTHER_NAMES = {"typical_p": "typ_p", "temp": "temperature"}
NO_EFFECT = "infill"  # an ignored sampler, which only helps models without fill-in-the-middle tokens
DEFAULT_ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
MAX_SAMPLERS = 16  # each costs some milliseconds a token with a large vocabulary
MAX_BREAKERS, MAX_BREAKER_CHARS, MAX_ALL_BREAKERS = 16, 40, 128

_Amount = Annotated[float, Meta(ge=0, le=1e6)]
_Length = Annotated[int, Meta(ge=0, le=MOST)]
_Window = Annotated[int, Meta(ge=-1, le=MOST)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Breaker = Annotated[str, Meta(min_length=1, max_length=MAX_BREAKER_CHARS)]

# `check_samplers` checks the values, because msgspec 0.22 crashes at exit where two types of a union share a pattern.
_Sampler = Annotated[str, Meta(extra_json_schema={"enum": [*LETTERS.values(), *OTHER_NAMES]})]
_Letters = Annotated[str, Meta(extra_json_schema={"pattern": "^[edskypmxti]*$"})]


def _doc(text: str) -> Meta:
    return Meta(description=text)


DryMultiplier = Annotated[_Amount | None, _doc("Above 0: DRY subtracts this from tokens that extend a repetition")]
DryBase = Annotated[
    Annotated[float, Meta(ge=1, le=1e6)] | None, _doc("DRY's factor for each token beyond the allowed length [1.75]")
]
DryAllowedLength = Annotated[_Length | None, _doc("Repetitions of fewer tokens cost nothing [2]")]
DryPenaltyLastN = Annotated[_Window | None, _doc("Look for repetitions in this many last tokens; -1: in all [-1]")]
DrySequenceBreakers = Annotated[
    Annotated[list[_Breaker], Meta(min_length=1, max_length=MAX_BREAKERS)] | None,
    _doc('Texts that end a repetition [`"\\n"`, `":"`, `"\\""`, `"*"`]'),
]
XtcProbability = Annotated[_Share | None, _doc("How often XTC drops all likely tokens but the least likely one")]
XtcThreshold = Annotated[_Share | None, _doc("From which probability on XTC calls a token likely [0.1]")]
TypicalP = Annotated[
    Annotated[float, Meta(ge=SMALLEST, le=LARGEST)] | None,
    _doc("Below 1: draw from tokens with information nearest to the entropy, with this probability together"),
]
TopNSigma = Annotated[
    Annotated[float, Meta(ge=-LARGEST, le=LARGEST)] | None,
    _doc("Above 0: draw from tokens within this many standard deviations of the highest logit"),
]
DynatempRange = Annotated[_Amount | None, _doc("The temperature follows the entropy, within this of `temperature`")]
DynatempExponent = Annotated[_Amount | None, _doc("With `dynatemp_range`: the exponent of the entropy's share [1]")]
RepeatLastN = Annotated[
    _Window | None,
    _doc("All penalties look at this many last tokens of prompt and answer; 0: no penalties, -1: at all"),
]
Mirostat = Annotated[
    Annotated[int, Meta(ge=0, le=2)] | None,
    _doc("1 or 2: keep the surprise of tokens near a target; all samplers except the temperature are then off"),
]
MirostatTau = Annotated[_Amount | None, _doc("Mirostat's target in bits [5]")]
MirostatEta = Annotated[_Amount | None, _doc("How fast Mirostat learns [0.1]")]
MinKeep = Annotated[_Length | None, _doc("`top_p`, `min_p`, `typical_p` and XTC leave at least this many tokens")]
SamplerOrder = Annotated[
    list[_Sampler] | _Letters | None,
    _doc("The samplers in their order, as names or letters of `edskypmxti`; the others are off"),
]


def check_breakers(texts: Sequence[str] | None) -> None:
    """Raises FieldError for breakers that are too long together, as each character costs a search in the vocabulary."""
    if sum(map(len, texts or ())) > MAX_ALL_BREAKERS:
        raise FieldError("dry_sequence_breakers", f"may have at most {MAX_ALL_BREAKERS} characters in all")


def order_of(samplers: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the names of the samplers, in order. samplers: names, or a string of letters; None: llama.cpp's order"""
    if samplers is None:
        return DEFAULT_ORDER
    named = [LETTERS[one] for one in samplers] if isinstance(samplers, str) else samplers
    return tuple(name for one in named if (name := OTHER_NAMES.get(one, one)) != NO_EFFECT)


def check_samplers(samplers: Sequence[str] | None) -> None:
    """Raises FieldError for the name of an unknown sampler, and for too many entries."""
    known = LETTERS.keys() if isinstance(samplers, str) else {*LETTERS.values(), *OTHER_NAMES}
    if unknown := [one for one in samplers or () if one not in known]:
        raise FieldError("samplers", f"has no {unknown[0]!r:.80}; there are {', '.join(LETTERS.values())}")
    if len(samplers or ()) > MAX_SAMPLERS:
        raise FieldError("samplers", f"may have at most {MAX_SAMPLERS} entries")
