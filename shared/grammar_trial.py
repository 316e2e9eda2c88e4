"""Builds a grammar with llguidance, to find out whether it can be built. Run it in an `Sandbox`, since it may crash.

llguidance follows nesting and references on the stack, without a limit. Building takes the same amount of stack with
any vocabulary or none, so a grammar that builds here on a small stack cannot overflow a larger stack later. The parent
needs only the constants; the child imports the library.
"""

from functools import cache
from typing import Any

ANSWER = f"{__name__}:answer"
COMPILE = f"{__name__}:compile_with_bytes"
SECONDS = 5.0  # time limit for one grammar
MEGABYTES = 512
# Half of the library's default, of which the grammar of calls in several forms needs up to four fifths. A pattern like
# ((a{100}){100}){100} then takes half of the memory and of the time that the default allows. The states that are not
# computed in advance are computed when an answer reaches them.
LEXER_FUEL = 500_000
NO_TEXT = "it allows no text"


def answer(what: str, grammar: str) -> str:
    """Returns the result of `error`, `compile_error`, `lark` or `without_text`, as `what` says."""
    return {"error": error, "compile_error": compile_error, "lark": lark, "without_text": without_text}[what](grammar)


def lark(grammar: str) -> str:
    """Returns a grammar of llama.cpp (`root ::= …`) in Lark; returns Lark as it is. Raises whatever the library does.

    The library follows nesting without a limit, and deep grammars take it minutes.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    return str(any_to_lark(grammar))


def error(grammar: str) -> str:
    """Returns the library's message about a grammar; empty if it is valid."""
    from llguidance import LLMatcher

    return str(LLMatcher.validate_grammar(grammar, limits=limits()))


def compile_error(grammar: str) -> str:
    """Returns why a grammar is not valid, or allows no text at all; empty if it is valid and allows some.

    Compiles the grammar for a vocabulary of bytes up to the first mask, so that a costly grammar is noticed.
    """
    from llguidance import LLMatcher

    if reason := error(grammar):
        return reason
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=limits())
    matcher.compute_bitmask()
    # Other errors may be due to the vocabulary, which lacks the tokens that a grammar may name.
    return NO_TEXT if str(matcher.get_error()).startswith("NoExtension") else ""


def without_text(grammars: str) -> str:
    """Returns the indexes of the grammars that allow no text. grammars: their texts, with a NUL between them"""
    found = [i for i, one in enumerate(grammars.split("\0")) if compile_error(one) == NO_TEXT]
    return " ".join(map(str, found))


def compile_with_bytes(grammar: str) -> None:
    """Builds and compiles a grammar, so that a costly one is noticed; the compiler itself reports an invalid one."""
    compile_error(grammar)


@cache
def _bytes() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def limits() -> Any:
    """Returns the library's limits for all grammars. Called by processes that have the library."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, initial_lexer_fuel=LEXER_FUEL)
