"""Reads a record, as `--record FILE --record-text` writes it (shared/logs/record.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from deploy.supervisor.child_command import CliError
from shared.logs.record import VERSION, RecordedRequest, older_files

BAD_FILE = 2  # the exit code
BEGIN = b'{"sluice_record":'  # how every line begins


@dataclass(frozen=True, slots=True)
class Record:
    """The requests that can be sent, in the order of their arrival.

    notes: sentences on requests that were left out
    """

    requests: Sequence[RecordedRequest]
    notes: Sequence[str]


def read_record(path: Path) -> Record:
    """Reads the file of a record, and its older files.

    Raises CliError, whose message names the file, if there is nothing to send.
    """
    requests: list[RecordedRequest] = []
    notes: list[str] = []
    for file in _files(path):
        found, notes_on_file = _read_file(file)
        requests += found
        notes += notes_on_file
    if not requests:
        raise CliError(f"{path} contains no complete line of a record", BAD_FILE)
    whole = [request for request in requests if request.request is not None]
    if not whole:
        raise CliError(f"{path} has only hashes: a record that can be replayed is made with --record-text", BAD_FILE)
    finished = [request for request in whole if request.outcome == "finished" and request.status == 200]
    counts = {
        "have no text": len(requests) - len(whole),
        "had not finished when they were recorded": len(whole) - len(finished),
        "are missing in the record, which could not be written in time": sum(request.lost for request in requests),
    }
    notes += [f"{count} requests {what}" for what, count in counts.items() if count]
    if not finished:
        raise CliError(f"{path} contains no request that had finished", BAD_FILE)
    return Record(sorted(finished, key=lambda request: datetime.fromisoformat(request.began)), notes)


def _files(path: Path) -> list[Path]:
    """Returns the files of a record, the oldest first. Raises CliError if there is none."""
    try:
        older = older_files(path)
        return [
            *(older[number] for number in sorted(older, reverse=True)),
            *([path] if path.exists() or not older else []),
        ]
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}", BAD_FILE) from error


def _read_file(path: Path) -> tuple[list[RecordedRequest], list[str]]:
    """Returns the requests of a file, and notes on incomplete lines, which a full disk or a killed process leaves."""
    try:
        # A complete line has a line end, so `rest` is empty or an incomplete line.
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}", BAD_FILE) from error
    notes = [f"the last line of {path} is incomplete and was left out"] if rest else []
    requests, torn = [], 0
    for number, line in enumerate(lines, 1):
        if line.startswith(BEGIN) and not _is_json(line):
            torn += 1
        elif line:
            requests.append(_read(path, number, line))
    if torn:
        notes.append(f"{torn} lines of {path} are incomplete and were left out")
    return requests, notes


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def _read(path: Path, number: int, line: bytes) -> RecordedRequest:
    try:
        request = msgspec.json.decode(line, type=RecordedRequest)
    except msgspec.DecodeError as error:
        raise CliError(
            f"line {number} of {path} is no line of a record, as --record writes them: {error}", BAD_FILE
        ) from error
    if request.sluice_record != VERSION:
        raise CliError(
            f"line {number} of {path} has version {request.sluice_record} of the format; this version of sluice reads "
            f"{VERSION}",
            BAD_FILE,
        )
    return request
