"""Declares settings: `setting` makes a field with a default, a meaning, a unit and bounds.

Knows no setting.
"""

import math
from dataclasses import Field, field
from typing import Any

BY_DEVICE = 0  # default of sizes that the worker derives from its device (worker.py); not a valid flag value


class ConfigError(ValueError):
    """Settings cannot be used; the message is one sentence that names the flags. The command exits with 2."""


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    shown: str = "",
    many: bool = False,
    secret: bool = False,
) -> Any:
    """Declares a field of a settings record.

    shown: the default in words, for a default that is determined later.
    many: whether the text is a list, which `words` splits; the flag then takes several values and may be repeated.
    secret: whether child processes get the value in their environment, because every user can read a command line.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most}
    metadata = {"help": help, "unit": unit, "choices": choices, "shown": shown, "many": many, "secret": secret}
    return field(default=default, metadata=metadata | bounds)


def words(text: str) -> list[str]:
    """Returns the values of a list setting, whose text separates them by commas or white space."""
    return text.replace(",", " ").split()


def value_problem(item: "Field[Any]", value: Any) -> str:
    """Describes what is wrong with a value of the right type ("must be at least 1"), or returns an empty string."""
    meta = item.metadata
    chosen = words(value) if meta["many"] else [value]
    if meta["choices"] and not {*chosen} <= {*meta["choices"]}:
        return f"must be one of {', '.join(meta['choices'])}"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if meta["at_least"] is not None and value < meta["at_least"]:
        return f"must be at least {meta['at_least']}"
    if meta["above"] is not None and value <= meta["above"]:
        return f"must be above {meta['above']}"
    if meta["at_most"] is not None and value > meta["at_most"]:
        return f"must be at most {meta['at_most']}"
    return ""


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")
