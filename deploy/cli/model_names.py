"""Short names of models, such as qwen3:4b: the table in model_names.toml, and the user's own file beside it."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from deploy.launcher.child_command import CliError
from shared.config.flags import all_flags

TABLE = Path(__file__).with_name("model_names.toml")
FIELDS = ("repository", "choose", "flags")
RESERVED = {"model"}  # the name itself says this


@dataclass(frozen=True, slots=True)
class NamedModel:
    """What a name means.

    model: for --model, or a hub repository with GGUF files of which one has to be chosen
    flags: flags of `sluice serve` that this model needs, as words of a command line
    """

    model: str
    flags: tuple[str, ...] = ()


def own_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the path of the user's file of names, which need not exist."""
    base = environment.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "sluice" / "models.toml"


def names() -> dict[str, NamedModel]:
    """Returns all names; those of the user's file win. Raises CliError that names the file and the entry at fault."""
    own = own_file()
    return read_names(TABLE) | (read_names(own) if own.is_file() else {})


def read_names(file: Path) -> dict[str, NamedModel]:
    """Reads one file of names. Raises CliError."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get("names", {})
    except (OSError, ValueError) as error:
        raise CliError(f"{file} cannot be read: {error}", 2) from error
    if not isinstance(table, dict):
        raise CliError(f"{file}: names must be a table", 2)
    return {name.casefold(): _entry(f"{file}: {name!r}", value) for name, value in table.items()}


def find(name: str) -> NamedModel:
    """Returns what a name means. A path, a hub id or a name that `sluice serve` knows means itself.

    Raises CliError with the nearest name, for a word that is none of these.
    """
    known = names()
    if (found := known.get(name.casefold())) is not None:
        return found
    if "/" in name or name in ("demo", ".", "..") or Path(name).expanduser().exists():
        return NamedModel(name)
    sizes = [other for other in known if other.partition(":")[0] == name.casefold()]
    close = sizes or get_close_matches(name.casefold(), known, n=3)
    hint = f"did you mean {', '.join(close)}?" if close else "`sluice run --list` shows the names."
    raise CliError(f"{name}: no such name, file or folder; {hint} A hub id has the form org/repository", 2)


def _entry(place: str, value: Any) -> NamedModel:
    if not isinstance(value, dict) or not isinstance(value.get("repository"), str):
        raise CliError(f"{place} needs a repository, as in {{ repository = 'org/name' }}", 2)
    if unknown := sorted(value.keys() - set(FIELDS)):
        raise CliError(f"{place}: {unknown[0]!r} is none of {', '.join(FIELDS)}", 2)
    choose, flags = value.get("choose", ""), value.get("flags", {})
    if not isinstance(choose, str) or not isinstance(flags, dict):
        raise CliError(f"{place}: choose must be a text, and flags a table", 2)
    known = {flag.option.removeprefix("--") for flag in all_flags()} - RESERVED
    for flag in flags:
        if flag not in known:
            raise CliError(f"{place}: flags: --{flag} is no flag of sluice serve", 2)
    words = tuple(_word(flag, setting) for flag, setting in flags.items())
    return NamedModel(f"{value['repository']}:{choose}" if choose else value["repository"], words)


def _word(flag: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"
