"""Which pattern of `rank_pattern` or `alpha_pattern` is a module's: the first that the end of its name matches.

Patterns are regular expressions of whoever made the adapter, and some take years: `(a*)*b`. Those that repeat or choose
are matched in a child process, whose end costs one adapter; plain names, which most are, without one.
"""

import re
from collections.abc import Sequence

from shared.adapters.files import CONFIG, AdapterError
from shared.processes.expendable import Expendable, Lost, NotStarted, Raised

PLAIN = re.compile(r"[\w.-]*")
MATCH, SECONDS, MEGABYTES = "shared.adapters.patterns:matches", 5.0, 256


def first_matches(field: str, patterns: Sequence[str], modules: Sequence[str]) -> list[int]:
    """Returns for each module the index of its pattern, -1 if it has none. Blocks for up to `SECONDS`.

    field: of the configuration, for errors. Raises AdapterError.
    """
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
    """Returns for each module the index of the first pattern that its name ends with, -1 if there is none."""
    compiled = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
    return [next((i for i, one in enumerate(compiled) if one.match(module)), -1) for module in modules]
