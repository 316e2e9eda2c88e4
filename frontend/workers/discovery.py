"""Worker addresses from the flags, from the lines of a file, and from DNS.

Knows no sockets. If the file cannot be read, or DNS fails, the addresses last found stay, and the log says so once.
"""

import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from shared.wire.address import Address, parse_all

log = logging.getLogger("sluice.pool")


def look_up(host: str) -> list[str]:
    """Returns the IPv4 addresses of a host, in a stable order; raises OSError."""
    entries = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in entries})


class Discovery:
    """Finds the workers' addresses. If `changing`, `resolve` reads a file or asks DNS: call it off the event loop."""

    def __init__(
        self, fixed: list[Address], file: Path | None = None, look_up: Callable[[str], list[str]] = look_up
    ) -> None:
        self.changing = file is not None or any(address.host for address in fixed)
        self._fixed = fixed
        self._file = file
        self._look_up = look_up
        self._stamp = (0, 0)  # modification time and size of the file when it was read
        self._from_file: list[Address] = []
        self._ips: dict[str, list[str]] = {}  # host name → its IP addresses
        self._problem = ""

    def resolve(self) -> list[Address]:
        """Returns the addresses of all workers, without duplicates: first from the flags, then from the file."""
        problems: list[str] = []
        configured = [*self._fixed, *self._read_file(problems)]
        resolved = list(dict.fromkeys(each for address in configured for each in self._expand(address, problems)))
        self._report("; ".join(problems))
        return resolved

    def _read_file(self, problems: list[str]) -> list[Address]:
        if self._file is None:
            return []
        try:
            stat = self._file.stat()
            if (stat.st_mtime_ns, stat.st_size) != self._stamp:
                lines = (line.partition("#")[0] for line in self._file.read_text().splitlines())
                self._from_file = [address for line in lines for address in parse_all(line)]
                self._stamp = stat.st_mtime_ns, stat.st_size
        except OSError as error:
            problems.append(f"--workers-file {self._file}: {error.strerror or error}")
        except ValueError as error:
            problems.append(f"--workers-file {self._file}: {error}")
        return self._from_file

    def _expand(self, address: Address, problems: list[str]) -> Iterator[Address]:
        """Yields the address itself or, if it has a host name, an address for each IP address of the host."""
        if not (host := address.host):
            yield address
            return
        try:
            self._ips[host] = self._look_up(host)
        except OSError as error:
            problems.append(f"cannot look up {host}: {error}")
        yield from (address.at(ip) for ip in self._ips.get(host, []))

    def _report(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem
