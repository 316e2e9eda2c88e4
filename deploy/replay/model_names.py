"""Translates names of models, because the server may have another name for its model than the recorded server had."""

from collections.abc import Mapping, Sequence

import msgspec

from deploy.supervisor.child_command import CliError
from shared.logs.record import RecordedRequest

ALL = ""  # as an old name: stands for every recorded name


def parse(words: Sequence[str]) -> dict[str, str]:
    """Returns old name → new name, from texts like "NEW" and "OLD=NEW". Raises CliError for any other text."""
    names = {}
    for word in words:
        old, _, new = word.rpartition("=")
        if not new or word.startswith("="):
            raise CliError(f"--model must be NEW or OLD=NEW, not {word!r}", 2)
        names[old] = new
    return names


def proposed(requests: Sequence[RecordedRequest], served: Sequence[str]) -> dict[str, str]:
    """Returns recorded name → the server's name, for recorded names that the server lacks. Empty unless all requests
    were for the same model.

    served: the names that the server has for its model.
    """
    if not served or len({request.model for request in requests}) != 1:
        return {}
    recorded = {name for request in requests if isinstance(name := request.request.get("model"), str)}
    return {name: served[0] for name in sorted(recorded) if name and name not in served}


def renamed(requests: Sequence[RecordedRequest], names: Mapping[str, str]) -> list[RecordedRequest]:
    """Returns the requests with the new names of models in their bodies."""
    return [_renamed(request, names) for request in requests]


def _renamed(request: RecordedRequest, names: Mapping[str, str]) -> RecordedRequest:
    new = names.get(str(request.request.get("model", ALL))) or names.get(ALL)
    return msgspec.structs.replace(request, request=request.request | {"model": new}) if new else request
