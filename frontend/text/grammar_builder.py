"""Builds the text of a grammar in llguidance's format from a JSON schema, a regular expression, etc., and checks it.

Knows neither API formats nor tokens; the worker (worker/grammar) compiles the text against the model's vocabulary.
`param` is the name of the request field that the client sent. If the grammar is refused, each function raises
Unprocessable with this name and llguidance's reason. Checking blocks, because it takes place in a child process
(`grammar_check`): call these functions from an event loop with `in_thread`.

White space in JSON is limited to none, one space, or a line break with up to 24 spaces or 6 tabs. So models may write
`{"a": 1}` or indented JSON, but cannot write blanks forever.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from frontend.errors import Unprocessable
from frontend.text import grammar_check
from frontend.text.closed_schema import closed
from shared.processes.expendable import Killed, Lost, Raised, TookTooLong

MAX_BYTES = 256 * 1024  # the longest text of one grammar
MAX_REASON = 400
WHITE_SPACE = r"( |\n( {0,24}|\t{0,6}))"


def json_object(param: str = "response_format") -> str:
    """Builds the grammar of any JSON object."""
    return json_schema({"type": "object"}, param)


def json_schema(schema: dict[str, Any] | bool, param: str, *, lenient: bool = False) -> str:
    """Builds the grammar of the JSON that a schema allows. Keywords that llguidance cannot enforce are refused or, if
    `lenient`, ignored."""
    return _checked(_grammars(f'{{"json_schema":{embedded(schema, param, lenient=lenient)}}}'), param)


def regex(pattern: str, param: str) -> str:
    """Builds the grammar of text that a regular expression matches as a whole.

    pattern: a regular expression in Rust's syntax, without look-around and back-references
    """
    start = f"start: /{as_lark_regex(pattern, param)}/" if pattern else 'start: ""'
    return _checked(_of_lark(start), param)


def as_lark_regex(pattern: str, param: str) -> str:
    """Returns a regular expression as Lark writes it between slashes, without checking it."""
    from llguidance import regex_to_lark

    _check_text(pattern, param)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # the library would drop the last backslash
        raise _refused(param, "it ends in a lone backslash")
    return str(regex_to_lark(pattern, ""))


def one_of(options: Sequence[str], param: str) -> str:
    """Builds the grammar that allows exactly one of these texts."""
    if not options:
        raise _refused(param, "there is nothing to choose from")
    texts = " | ".join(_json(option, param) for option in options if option)
    # An empty text cannot be a terminal. The others form one terminal: llguidance fails with over 2000 alternatives.
    start = "start: CHOICE" + (' | ""' if "" in options else "") if texts else 'start: ""'
    return _checked(_of_lark(f"{start}\nCHOICE: {texts}" if texts else start), param)


def lark(text: str, param: str) -> str:
    """Builds a grammar from llguidance's Lark, or from llama.cpp's GBNF (`root ::= …`), which it translates to Lark."""
    _check_text(text, param)
    try:
        text = grammar_check.lark(text)
    except Lost as error:
        raise _refused(param, str(error)) from None
    except Raised as error:  # the library's parser may raise anything
        raise _refused(param, f"neither Lark nor GBNF: {str(error).partition(': ')[2]}") from None
    return _checked(_of_lark(text), param)


def composed(text: str, param: str, answer: str = "") -> str:
    """Builds a grammar from Lark that we wrote ourselves. There, `@answer` means the grammar `answer`."""
    if not answer:
        return _checked(_of_lark(text), param)
    (part,) = msgspec.json.decode(answer)["grammars"]
    return _checked(_grammars(f'{{"lark_grammar":{_json(text)}}},{_json({**part, "name": "answer"})}'), param)


def embedded(schema: dict[str, Any] | bool, param: str, *, lenient: bool = False) -> str:
    """Returns a schema for `%json <schema>` in Lark, closed and with limited white space. Does not check it."""
    try:
        plain = closed(schema) if isinstance(schema, dict) else {"enum": []} if schema is False else {}
    except RecursionError as error:
        raise _refused(param, str(error)) from None
    guidance = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "lenient": lenient}
    return _json({**plain, "x-guidance": guidance}, param)


async def in_thread(make: Callable[[], str]) -> str:
    """Calls one of the functions above in a thread, when the tenant's turn comes (see `grammar_check.in_turn`)."""
    return await grammar_check.in_turn(make)


def _json(value: Any, param: str = "") -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(param, str(error)) from None


def _grammars(entry: str) -> str:
    return f'{{"grammars":[{entry}]}}'


def _of_lark(text: str) -> str:
    return _grammars(f'{{"lark_grammar":{_json(text)}}}')


def _checked(grammar: str, param: str) -> str:
    _check_text(grammar, param)
    try:
        reason = grammar_check.error(grammar)
    except (TookTooLong, Killed) as failure:
        reason = str(failure)
    if reason:
        raise _refused(param, reason)
    return grammar


def _check_text(text: str, param: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _refused(param, "it is not valid Unicode") from None
    if size > MAX_BYTES:
        raise Unprocessable(f"`{param}` is larger than {MAX_BYTES} bytes", param=param, code="invalid_grammar")


def _refused(param: str, reason: str) -> Unprocessable:
    reason = reason.strip()
    shown = reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + " …"
    return Unprocessable(f"`{param}` cannot be enforced: {shown}", param=param, code="invalid_grammar")
