"""Reads and writes the file of `sluice serve --config`: TOML, in which every key is the name of a flag without dashes.

    model = "/models/Qwen3-8B-Q4_K_M.gguf"
    max-seq-len = 16384
    prefix-cache = false
    api-key = ["sk-one", "sk-two"]

A flag on the command line wins over the file, and so does its SLUICE_ variable.
"""

import argparse
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shared.config.declaration import ConfigError
from shared.config.flags import Flag

Value = bool | int | float | str


def read_config(file: Path, flags: Sequence[Flag]) -> dict[str, Any]:
    """Returns the values in the file by the names of settings. Raises ConfigError, which names the file and the key."""
    try:
        table = tomllib.loads(file.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {file}: {error}") from None
    known = {flag.option.removeprefix("--"): flag for flag in flags}
    found = {}
    for key, value in table.items():
        flag = known.get(key.replace("_", "-"))
        if flag is None:
            close = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(
                f"--config {file}: {key!r} is no flag of sluice serve"
                + (f"; did you mean {close[0]}?" if close else "")
            )
        if flag.name in found:
            raise ConfigError(f"--config {file}: {key!r} stands there twice")
        found[flag.name] = _value(flag, value, f"--config {file}: {key}")
    return found


def _value(flag: Flag, value: Any, source: str) -> Any:
    if isinstance(value, list) and flag.field.metadata["many"]:
        if not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{source} must be a list of texts")
        return flag.value(",".join(value), source)
    kinds = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}[_type(flag)]
    if type(value) not in kinds:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
        raise ConfigError(f"{source} must be {names[_type(flag)]}, not {value!r:.60}")
    return flag.value(str(value), source)


def _type(flag: Flag) -> type:
    kind = flag.field.type
    assert isinstance(kind, type)
    return kind


def add_config(
    namespace: argparse.Namespace, file: Path, flags: Sequence[Flag], environment: Mapping[str, str]
) -> None:
    """Adds the values of the file to a parsed command line, except those that this or the environment states.

    Raises ConfigError.
    """
    for name, value in read_config(file, flags).items():
        flag = next(flag for flag in flags if flag.name == name)
        if name not in namespace and flag.variable not in environment:
            setattr(namespace, name, value)


def config_text(
    values: Mapping[str, Value], comments: Sequence[str] = (), notes: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Returns the text of a file with these values, by the names of settings, below comments.

    notes: of some settings, what stands above their line
    """
    lines = [f"# {line}".rstrip() for line in comments]
    for name, value in values.items():
        lines += [f"# {notes[name]}"] if name in notes else []
        lines.append(f"{name.replace('_', '-')} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Value) -> str:
    """Returns a value in TOML, whose numbers, truth values and basic strings are JSON's."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
