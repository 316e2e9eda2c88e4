"""Where the workers are, now: the addresses given, the lines of a file, and all that a host's name stands for.

Knows no sockets. What cannot be read or looked up at the moment leaves things as they were, and is logged once.
"""

import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from shared.address import Address, parse_all

log = logging.getLogger("sluice.fleet")


def look_up(host: str) -> list[str]:
    """The IPv4 addresses of a host, in a stable order; raises OSError."""
    found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in found})


class Discovery:
    """`look()` blocks (a file, the resolver): call it off the event loop when `changing`."""

    def __init__(
        self, fixed: list[Address], file: Path | None = None, look_up: Callable[[str], list[str]] = look_up
    ) -> None:
        self.changing = file is not None or any(address.host for address in fixed)
        self._fixed = fixed
        self._file = file
        self._look_up = look_up
        self._seen = (0, 0)  # the file's time and size
        self._said: list[Address] = []
        self._hosts: dict[str, list[str]] = {}
        self._trouble = ""

    def look(self) -> list[Address]:
        """Every worker's address, each once, in order."""
        trouble: list[str] = []
        given = [*self._fixed, *self._lines(trouble)]
        found = list(dict.fromkeys(at for address in given for at in self._resolved(address, trouble)))
        self._report("; ".join(trouble))
        return found

    def _lines(self, trouble: list[str]) -> list[Address]:
        if self._file is None:
            return []
        try:
            now = self._file.stat()
            if (now.st_mtime_ns, now.st_size) != self._seen:
                lines = (line.partition("#")[0] for line in self._file.read_text().splitlines())
                self._said = [address for line in lines for address in parse_all(line)]
                self._seen = now.st_mtime_ns, now.st_size
        except OSError as error:
            trouble.append(f"--workers-file {self._file}: {error.strerror or error}")
        except ValueError as error:
            trouble.append(f"--workers-file {self._file}: {error}")
        return self._said

    def _resolved(self, address: Address, trouble: list[str]) -> Iterator[Address]:
        if not (host := address.host):
            yield address
            return
        try:
            self._hosts[host] = self._look_up(host)
        except OSError as error:
            trouble.append(f"cannot look up {host}: {error}")
        yield from (address.at(ip) for ip in self._hosts.get(host, []))

    def _report(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            log.warning("%s", trouble)
        self._trouble = trouble
