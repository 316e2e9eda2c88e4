"""Structured output: makes one grammar from the request fields that constrain the answer.

`frontend/text/grammar_builder.py` builds grammars from each kind of source. Building and checking run in a thread.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from frontend.api.chat.structured_output_fields import Kind, StructuredOutput
from frontend.api.requests.request_model import out_of_range
from frontend.errors import Unprocessable
from frontend.text import grammar_builder
from frontend.text.structural_tag import structural_tag

MAX_COPIED = 16 << 20  # how many characters of grammar one request may send to the worker


def _json_schema(value: Any, name: str, strict: bool) -> str:
    """Builds the grammar of a JSON schema. value: the schema, or its JSON text"""
    if type(value) is str:
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise Unprocessable(f"`{name}` is not JSON: {error}", param=name, code="invalid_grammar") from None
    if type(value) not in (dict, bool):
        raise out_of_range(name, value, "a JSON schema")
    return grammar_builder.json_schema(value, name, lenient=not strict)


GRAMMARS: dict[Kind, Callable[[Any, str], str]] = {
    "json_object": lambda _, param: grammar_builder.json_object(param),
    "regex": grammar_builder.regex,
    "choice": grammar_builder.one_of,
    "grammar": grammar_builder.lark,
    "structural_tag": structural_tag,
}


async def grammar(requested: Sequence[StructuredOutput], copies: int = 1) -> str:
    """Builds the requested grammar; empty if none is requested.

    copies: how many sequences each send the grammar to the worker
    Raises Unprocessable for two grammars, for an invalid one, and for one that is too large for that many copies.
    """
    if len(requested) > 1:
        names = " and ".join(f"`{one.param}`" for one in requested)
        raise Unprocessable(
            f"an answer can have one form only: {names} are given", param=requested[1].param, code="conflicting_fields"
        )
    if not requested:
        return ""
    (one,), param = requested, requested[0].param
    if one.kind == "json":
        make = partial(_json_schema, one.value, param, one.strict)
    else:
        make = partial(GRAMMARS[one.kind], one.value, param)
    text = await grammar_builder.in_thread(make)
    if len(text) * copies > MAX_COPIED:
        raise Unprocessable(
            f"`{param}` is too large for {copies} answers in one request", param=param, code="out_of_range"
        )
    return text
