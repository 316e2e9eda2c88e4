"""Adapters with a name and a folder, as `--lora-modules` and the route that loads an adapter state them."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config import ConfigError, ModelConfig

MAX_NAME_CHARS = 256  # limit on an adapter's name, which requests state as their `model`
FLAG = "--lora-modules"
JSON_KEYS = {"name", "path", "base_model_name"}


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """name: the name in requests. path: the adapter's folder. base: the base model's name; empty: the served model."""

    name: str
    path: str
    base: str = ""


def named_adapters(model: ModelConfig) -> tuple[NamedAdapter, ...]:
    """Returns the adapters of --lora-modules. Raises ConfigError."""
    found = tuple(_each(model.lora_modules))
    names = [adapter.name for adapter in found]
    for adapter in found:
        if problem := name_problem(adapter.name):
            raise ConfigError(f"{FLAG}: the name {adapter.name[:MAX_NAME_CHARS]!r} {problem}")
        if names.count(adapter.name) > 1 or adapter.name in model.names:
            raise ConfigError(f"{FLAG}: the name {adapter.name!r} is given twice, or is that of the base model")
        if adapter.base and adapter.base not in model.names:
            raise ConfigError(
                f"{FLAG}: base_model_name {adapter.base!r} of {adapter.name!r} is not served; "
                f"the base is {model.name!r}"
            )
    return found


def name_problem(name: str) -> str:
    """Returns what is wrong with the name of an adapter; empty if nothing is wrong."""
    if not name or len(name) > MAX_NAME_CHARS:
        return f"must have 1 to {MAX_NAME_CHARS} characters"
    if any(not letter.isprintable() or "\ud800" <= letter <= "\udfff" for letter in name):
        return "must have printable characters only"
    return ""


def _each(text: str) -> Iterator[NamedAdapter]:
    """Yields the adapters in a list of NAME=PATH entries and JSON objects, separated by commas or white space."""
    decoder = json.JSONDecoder()
    rest = text.strip(", \t\n")
    while rest:
        if rest.startswith("{"):
            try:
                value, end = decoder.raw_decode(rest)
            except ValueError as error:
                raise ConfigError(f"{FLAG}: {rest[:80]!r} is not JSON: {error}") from None
            yield _from_json(value)
        else:
            end = next((at for at, letter in enumerate(rest) if letter in ", \t\n"), len(rest))
            name, equals, path = rest[:end].partition("=")
            if not (name and equals and path):
                raise ConfigError(f"{FLAG} takes NAME=PATH, or JSON with name and path, not {rest[:end][:80]!r}")
            yield NamedAdapter(name, _absolute(path))
        rest = rest[end:].strip(", \t\n")


def _from_json(value: Any) -> NamedAdapter:
    if not {"name", "path"} <= value.keys() <= JSON_KEYS or not all(isinstance(each, str) for each in value.values()):
        raise ConfigError(f"{FLAG}: JSON needs the texts name and path, and may have base_model_name, not {value}")
    return NamedAdapter(value["name"], _absolute(value["path"]), value.get("base_model_name", ""))


def _absolute(path: str) -> str:
    return os.path.realpath(Path(path).expanduser())


def path_problem(path: str, model: ModelConfig) -> str:
    """Returns why the folder of an adapter may not be read; empty if it may.

    A folder may be read if a flag names it, or if it lies below the folder of --allow-runtime-lora with links resolved.
    """
    try:
        real = os.path.realpath(path)
    except ValueError:
        return "is not the name of a file: it has a zero byte"
    if any(adapter.path == real for adapter in named_adapters(model)):
        return ""
    if not model.allow_runtime_lora:
        return "is not in --lora-modules, and the server was not started with --allow-runtime-lora"
    root = os.path.realpath(Path(model.allow_runtime_lora).expanduser())
    below = os.path.commonpath((root, real)) == root and real != root
    return "" if below else "is not below the folder of --allow-runtime-lora"
