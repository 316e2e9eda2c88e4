"""Another host: a network namespace with one wire to ours for the server, and one for its clients. Needs root and `ip`.

Knows addresses and commands; nothing of servers. A cut wire swallows what is sent, as a network between two hosts does:
neither end is told.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

_NOBODY = "02:00:00:00:00:01"  # a hardware address that no device of either end has


@dataclass(frozen=True, slots=True)
class Wire:
    """`here` and `there` are addresses of the same wire's ends; `device` is its name at our end."""

    device: str
    here: str
    there: str


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace; `server` leads to the worker and can be cut, `clients` never is."""

    name: str
    server: Wire
    clients: Wire

    def command(self, words: Sequence[str]) -> list[str]:
        """The same command, run on that host; it stays one process."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        for namespace, other, device in self._ends():
            _ip(*namespace, "neigh", "replace", other, "lladdr", _NOBODY, "dev", device, "nud", "permanent")

    def mend(self) -> None:
        for namespace, other, device in self._ends():
            _ip(*namespace, "neigh", "del", other, "dev", device)

    def _ends(self) -> list[tuple[list[str], str, str]]:
        """Of the server's wire: where `ip` is to act, whom that end talks to, and through which device."""
        wire = self.server
        return [([], wire.there, wire.device), (["-n", self.name], wire.here, "server")]


@contextmanager
def other_host() -> Iterator[Host]:
    """Nothing is left of it afterwards. Raises AssertionError where namespaces cannot be made."""
    number = os.getpid() % 8192
    name = f"sluice{number}"
    with ExitStack() as stack:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        _ip("-n", name, "link", "set", "lo", "up")
        yield Host(name, _wire(stack, name, "server", 2 * number), _wire(stack, name, "clients", 2 * number + 1))


def _wire(stack: ExitStack, name: str, there: str, number: int) -> Wire:
    """The `number`th subnet of 198.18.0.0/15, which is set apart for testing (RFC 2544)."""
    first, device = (198 << 24) + (18 << 16) + 4 * number, f"sl{number}"
    wire = Wire(device, _dotted(first + 1), _dotted(first + 2))
    _ip("link", "add", device, "type", "veth", "peer", "name", there, "netns", name)
    stack.callback(_ip, "link", "del", device)  # a namespace's end takes its devices along, but later
    for end, address, own in (([], wire.here, device), (["-n", name], wire.there, there)):
        _ip(*end, "addr", "add", f"{address}/30", "dev", own)
        _ip(*end, "link", "set", own, "up")
    return wire


def _dotted(number: int) -> str:
    return ".".join(str(byte) for byte in number.to_bytes(4, "big"))


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise AssertionError("another host needs the command ip (package iproute2)") from None
    assert not done.returncode, f"ip {' '.join(words)}: {done.stderr.strip()}"
