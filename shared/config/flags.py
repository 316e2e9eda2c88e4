"""Reads settings: one command-line flag and one SLUICE_ variable for every field of the records in shared/config/.

Knows how text becomes a value and how a flag documents itself; knows no setting by name. Flags win over the
environment, the environment over defaults. Every mistake is a `ConfigError` of one sentence that names the flag or
variable at fault.
"""

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shared.config.check import check
from shared.config.declaration import ConfigError, flag_name, value_problem
from shared.config.settings import Settings, non_default_names, with_values

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# SLUICE_ variables that are not settings.
OTHER_VARIABLES = ("SLUICE_EPOCH", "SLUICE_NATIVE", "SLUICE_ISA")
_METAVARS = {str(int): "N", str(float): "X"}


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting as a command-line flag and an environment variable."""

    record: str  # name of the field of Settings whose record holds this setting
    field: "dataclasses.Field[Any]"

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def option(self) -> str:
        return flag_name(self.name)

    @property
    def variable(self) -> str:
        return "SLUICE_" + self.name.upper()

    @property
    def help(self) -> str:
        unit = f"{self.field.metadata['unit']}; " if self.field.metadata["unit"] else ""
        default = self.field.metadata["shown"] or self._format(self.field.default)
        return f"{self.field.metadata['help']} [{unit}default {default}; {self.variable}]".replace("%", "%%")

    def _format(self, value: Any) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        return str(value) if value != "" else "empty"

    def value(self, text: str, source: str) -> Any:
        """Converts text to this setting's type. Raises ConfigError.

        source: the flag or variable that the text came from, for the message.
        """
        try:
            value = _convert(self.field.type, text)
        except ValueError as error:
            raise ConfigError(f"{source} {error}, not {text!r}") from None
        if problem := value_problem(self.field, value):
            raise ConfigError(f"{source} {problem}, not {text!r}")
        return value


class Parser(argparse.ArgumentParser):
    """An argument parser that accepts no abbreviations and raises every mistake as a one-sentence ConfigError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Like parse_args, but an unknown flag raises an error that suggests the nearest known one."""
        namespace, extra = self.parse_known_args(argv)
        if extra:
            raise ConfigError(self._unknown(extra[0].partition("=")[0]))
        return namespace

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}"
        known = [
            option for action in self._actions if action.help != argparse.SUPPRESS for option in action.option_strings
        ]
        matches = difflib.get_close_matches(word, known, n=1)
        return f"unknown flag {word}; " + (f"did you mean {matches[0]}?" if matches else f"see {self.prog} --help")


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def all_flags() -> tuple[Flag, ...]:
    """Returns a flag for every setting, in the order of the records."""
    records: dict[str, Any] = {record.name: record.type for record in dataclasses.fields(Settings)}
    return tuple(Flag(name, item) for name, record in records.items() for item in dataclasses.fields(record))


def select(records: Collection[str], also: Collection[str] = ()) -> tuple[Flag, ...]:
    """Returns the flags of whole records and of single settings.

    records: names of fields of `Settings`.
    also: names of single settings of other records.
    """
    return tuple(flag for flag in all_flags() if flag.record in records or flag.name in also)


def add_flags(parser: argparse.ArgumentParser, flags: Sequence[Flag]) -> None:
    """Adds one documented option per flag, grouped by record. Options that are not given stay out of the namespace."""
    groups: dict[str, Any] = {}
    for flag in flags:
        if flag.record not in groups:
            groups[flag.record] = parser.add_argument_group(flag.record)
        _add(groups[flag.record], flag)


def given_values(
    namespace: argparse.Namespace, environment: Mapping[str, str], flags: Sequence[Flag]
) -> dict[str, Any]:
    """Returns the explicitly given settings by name; a flag wins over the environment."""
    return dict(_explicit(vars(namespace), environment, flags))


def read(namespace: argparse.Namespace, environment: Mapping[str, str], flags: Sequence[Flag]) -> Settings:
    """Returns checked settings from a parsed command line and the environment. Raises ConfigError."""
    values = given_values(namespace, environment, flags)
    return check(with_values(Settings(), values), values.keys())


def to_argv(settings: Settings, flags: Sequence[Flag]) -> list[str]:
    """Returns the shortest command line that yields these settings, without secrets, if no SLUICE_ variable is set."""
    return [_argument(flag, value) for flag, value in _changed(settings, flags) if not flag.field.metadata["secret"]]


def secret_variables(settings: Settings, flags: Sequence[Flag]) -> dict[str, str]:
    """Returns the secret settings, which `to_argv` leaves out, as environment variables."""
    return {flag.variable: value for flag, value in _changed(settings, flags) if flag.field.metadata["secret"]}


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables of settings, for a child that gets all settings as flags."""
    variables = {flag.variable for flag in all_flags()}
    return {name: value for name, value in environment.items() if name not in variables}


def misspelt_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns a sentence for each variable whose name is close to a setting's.

    Other unknown SLUICE_ names are accepted, because Kubernetes sets such variables for a service called sluice.
    """
    known = [*OTHER_VARIABLES, *(flag.variable for flag in all_flags())]
    unknown = sorted(name for name in environment if name.startswith("SLUICE_") and name not in known)
    matches = ((name, difflib.get_close_matches(name, known, n=1, cutoff=0.85)) for name in unknown)
    return [f"{name} is not a setting; did you mean {close[0]}?" for name, close in matches if close]


def _changed(settings: Settings, flags: Sequence[Flag]) -> Iterator[tuple[Flag, Any]]:
    changed = non_default_names(settings)
    for flag in flags:
        if flag.name in changed:
            yield flag, getattr(getattr(settings, flag.record), flag.name)


def _add(group: Any, flag: Flag) -> None:
    common: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS, "help": flag.help}
    if flag.field.type is bool:
        group.add_argument(flag.option, action=argparse.BooleanOptionalAction, **common)
        return
    choices = flag.field.metadata["choices"]
    metavar = "|".join(choices) if choices else _METAVARS.get(str(flag.field.type), "TEXT")
    if flag.field.metadata["many"]:
        common |= {"action": "extend", "nargs": "+"}
    group.add_argument(flag.option, metavar=metavar, **common)


def _explicit(
    options: Mapping[str, Any], environment: Mapping[str, str], flags: Sequence[Flag]
) -> Iterator[tuple[str, Any]]:
    for flag in flags:
        if flag.name in options:
            value = "--" if options[flag.name] == [] else options[flag.name]  # argparse turns --model=-- into []
            value = ",".join(value) if isinstance(value, list) else value
            yield flag.name, flag.value(value, flag.option) if isinstance(value, str) else value
        elif flag.variable in environment:
            yield flag.name, flag.value(environment[flag.variable], flag.variable)


def _convert(type_: Any, text: str) -> Any:
    if type_ is bool:
        return _boolean(text.strip().lower())
    try:
        return type_(text)
    except ValueError:
        raise ValueError("must be a whole number" if type_ is int else "must be a number") from None


def _boolean(text: str) -> bool:
    if text not in _TRUE + _FALSE:
        raise ValueError("must be 1 or 0 (or true, false, yes, no, on, off)")
    return text in _TRUE


def _argument(flag: Flag, value: Any) -> str:
    if isinstance(value, bool):
        return flag.option if value else flag_name(f"no_{flag.name}")
    return f"{flag.option}={value}"


# Argument types for argparse, for flags that are not settings: bad values are rejected before any work is done.


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def positive_int(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def new_file(text: str) -> Path:
    """Parses the path of a file to write. The folder of the file must exist, and the path must not be a folder."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: its folder does not exist, or it is a folder itself"
        )
    return path


def comma_separated(known: Collection[str], *, every: Collection[str] = ()) -> Callable[[str], tuple[str, ...]]:
    """Returns a parser of comma-separated names, which drops duplicates.

    every: the names that `all` stands for; if empty, `all` is not accepted.
    """

    def read(text: str) -> tuple[str, ...]:
        if every and text == "all":
            return tuple(every)
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                choices = ["all", *known] if every else known
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(choices)}")
        return names

    return read
