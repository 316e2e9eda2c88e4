"""Reads Ollama's Modelfile: FROM, PARAMETER, SYSTEM, TEMPLATE, MESSAGE and LICENSE.

Also checks the parameters of a name that is made for a model, wherever they come from. Reads no file and no model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from frontend.api.ollama.types import Options
from frontend.chat.template_sandbox import compile_problem
from frontend.errors import BadRequest, SluiceError, Unprocessable
from frontend.model_context import PRESET_SAMPLING
from frontend.schema.decoding import decode
from shared.preset import MOST_TEXT, Preset, Told

COMMAND = re.compile(r"\s*(?P<word>[A-Za-z]+)[ \t]+")
ROLES = ("system", "user", "assistant")
WITH_EFFECT = {*PRESET_SAMPLING, "stop", "num_predict"}
# Parameters that no name can have here, with the value that leaves them off.
OFF: Mapping[str, object] = {"mirostat": 0, "typical_p": 1.0, "repeat_last_n": -1, "tfs_z": 1.0}
GO = re.compile(r"\{\{-?\s*(\.[A-Z]|if\b|range\b|end\b|else\b|with\b|template\b|\$)")


@dataclass(slots=True)
class Modelfile:
    """What a Modelfile says."""

    base: str = ""
    preset: dict[str, str] = field(default_factory=dict)  # system, template, license
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[Told] = field(default_factory=list)


def read_modelfile(text: str) -> Modelfile:
    """Reads a Modelfile. Raises BadRequest, which names the line and the command."""
    found, rest, line = Modelfile(), text, 1
    while rest.strip():
        if (skipped := re.match(r"(\s*(#[^\n]*)?\n)+|\s*#[^\n]*$", rest)) is not None:
            rest, line = rest[skipped.end() :], line + skipped[0].count("\n")
            continue
        command = COMMAND.match(rest)
        if command is None:
            raise _wrong(line, f"{rest.strip().splitlines()[0]!r:.60} is no command with a value")
        value, rest_after = _value(rest[command.end() :], line)
        _take(found, command["word"].upper(), value, line)
        line += rest[: len(rest) - len(rest_after)].count("\n")
        rest = rest_after
    if not found.base:
        raise _wrong(line, "FROM is missing")
    return found


def _value(rest: str, line: int) -> tuple[str, str]:
    """Returns the value of a command, and the text after it: a line, or all between triple quotes."""
    prefix = re.match(r'(?P<before>[^\n"]*)"""', rest)
    if prefix is None:
        value, _, after = rest.partition("\n")
        return _unquoted(value.strip()), after
    end = rest.find('"""', prefix.end())
    if end < 0:
        raise _wrong(line, '""" is not closed')
    return prefix["before"] + rest[prefix.end() : end], rest[end + 3 :].partition("\n")[2]


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


def _take(found: Modelfile, word: str, value: str, line: int) -> None:
    first, _, rest = value.partition(" ")
    match word:
        case "FROM" if not found.base:
            found.base = value
        case "FROM":
            raise _wrong(line, "FROM stands twice; a model has one base here")
        case "SYSTEM" | "TEMPLATE" | "LICENSE":
            found.preset[word.lower()] = value
        case "PARAMETER":
            _parameter(found.parameters, first, _unquoted(rest.strip()), line)
        case "MESSAGE":
            if first not in ROLES:
                raise _wrong(line, f"MESSAGE has one of the roles {', '.join(ROLES)}, not {first!r:.40}")
            found.messages.append(Told(first, _unquoted(rest.strip())))
        case "ADAPTER":
            raise _wrong(line, "ADAPTER has no effect here: adapters are given with --lora-modules")
        case _:
            raise _wrong(line, f"the command {word!r:.40} is not known")


def _parameter(parameters: dict[str, Any], name: str, text: str, line: int) -> None:
    """Adds a parameter; `stop` may be given several times."""
    if not text:
        raise _wrong(line, f"PARAMETER {name:.40} has no value")
    if name == "stop":
        parameters["stop"] = [*parameters.get("stop", []), text]
        return
    try:
        parameters[name] = msgspec.json.decode(text, type=bool | int | float)
    except msgspec.DecodeError:
        raise _wrong(line, f"PARAMETER {name:.40} must be a number, true or false, not {text!r:.40}") from None


def _wrong(line: int, problem: str) -> BadRequest:
    return BadRequest(f"`modelfile`: line {line}: {problem}", param="modelfile", code="invalid_modelfile")


async def checked_preset(made: Preset) -> Preset:
    """Returns a preset without parameters that have no effect. Raises BadRequest or Unprocessable, which name the
    field."""
    for name in ("system", "template", "license"):
        if len(getattr(made, name)) > MOST_TEXT:
            raise Unprocessable(f"`{name}` may have {MOST_TEXT} characters at most", param=name, code="out_of_range")
    if sum(len(one.content) for one in made.messages) > MOST_TEXT:
        raise Unprocessable(f"`messages` may have {MOST_TEXT} characters", param="messages", code="out_of_range")
    if made.template:
        await _check_template(made.template)
    kept: dict[str, Any] = {}
    for name, value in made.parameters.items():
        if name in OFF and value != OFF[name]:
            raise Unprocessable(
                f"`parameters.{name}`: a name's default cannot be a sampler; send it in `options`",
                param=f"parameters.{name}", code="out_of_range",
            )  # fmt: skip
        if name in WITH_EFFECT:
            kept[name] = value
    try:
        decode(msgspec.json.encode(made.parameters), Options)
    except SluiceError as error:
        raise error.renamed(error.param or "", f"parameters.{error.param}") from None
    return msgspec.structs.replace(made, parameters=kept)


async def _check_template(template: str) -> None:
    if GO.search(template):
        raise BadRequest(
            "`template` is one of Go, and this server's are of Jinja: leave it out, and the model's own is used",
            param="template", code="template_not_read",
        )  # fmt: skip
    if problem := await compile_problem(template):
        raise BadRequest(f"`template`: {problem}", param="template", code="template_not_read")
