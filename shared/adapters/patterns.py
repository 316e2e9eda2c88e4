"""Finds the pattern of `rank_pattern` or `alpha_pattern` for a module: the first that matches the end of its name.

Patterns are regular expressions written by the author of the adapter, and matching can take years, as for `(a*)*b`.
Patterns with repetition or alternatives are matched in a child process, whose death costs only this adapter. Plain
names, the usual case, are matched without a child.
"""

import re
from collections.abc import Sequence

from shared.adapters.files import CONFIG, AdapterError
from shared.processes.expendable import Expendable, Lost, NotStarted, Raised

PLAIN = re.compile(r"[\w.-]*")
MOST_MATCHES = 2_000_000  # patterns times modules: some seconds of matching
MATCH, SECONDS, MEGABYTES = "shared.adapters.patterns:matches", 5.0, 256


def first_matches(field: str, patterns: Sequence[str], modules: Sequence[str]) -> list[int]:
    """Returns the index of each module's pattern, -1 if no pattern matches. Blocks for up to `SECONDS`.

    field: the field of the configuration, for errors. Raises AdapterError.
    """
    if len(patterns) * len(modules) > MOST_MATCHES:
        raise AdapterError(f"{CONFIG}: {field} has {len(patterns)} patterns for {len(modules)} modules: too many")
    if all(PLAIN.fullmatch(pattern) for pattern in patterns):
        return matches(patterns, modules)
    child = Expendable(MATCH, megabytes=MEGABYTES)
    try:
        found: list[int] = child.call(patterns, modules, seconds=SECONDS)
    except Lost as error:
        raise AdapterError(f"{CONFIG}: {field} cannot be matched: {error}") from None
    except (Raised, UnicodeEncodeError) as error:
        raise AdapterError(f"{CONFIG}: {field} has something that is no regular expression: {error}") from None
    except NotStarted as error:
        raise AdapterError(f"{CONFIG}: {field} cannot be matched now: {error}") from None
    finally:
        child.close()
    return found


def matches(patterns: Sequence[str], modules: Sequence[str]) -> list[int]:
    """Returns for each module the index of the first pattern that matches the end of its name; -1 for no match."""
    compiled = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
    return [next((i for i, one in enumerate(compiled) if one.match(module)), -1) for module in modules]
