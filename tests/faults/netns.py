"""Simulates another host by a network namespace with two links to this host: one for the server, one for clients.

Needs root and `ip`. Knows addresses and commands, but no servers. A cut link swallows packets, as a network between two
hosts does: neither end gets an error.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

_UNUSED_MAC = "02:00:00:00:00:01"  # a hardware address that no device has


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """`here` and `there` are the addresses of the two ends; `device` is the name of the end on this host."""

    device: str
    here: str
    there: str


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace; the link `server` leads to the worker and can be cut, the link `clients` is never cut."""

    name: str
    server: NetworkLink
    clients: NetworkLink

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command that runs `words` on this host as a single process."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        for namespace, other, device in self._ends():
            _ip(*namespace, "neigh", "replace", other, "lladdr", _UNUSED_MAC, "dev", device, "nud", "permanent")

    def mend(self) -> None:
        for namespace, other, device in self._ends():
            _ip(*namespace, "neigh", "del", other, "dev", device)

    def _ends(self) -> list[tuple[list[str], str, str]]:
        """Returns, for each end of the server's link, `ip`'s namespace options, the other end's address, the device."""
        wire = self.server
        return [([], wire.there, wire.device), (["-n", self.name], wire.here, "server")]


@contextmanager
def other_host() -> Iterator[Host]:
    """Makes the host and removes it afterwards. Raises AssertionError if namespaces cannot be made."""
    number = os.getpid() % 8192
    name = f"sluice{number}"
    with ExitStack() as stack:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        _ip("-n", name, "link", "set", "lo", "up")
        yield Host(name, _wire(stack, name, "server", 2 * number), _wire(stack, name, "clients", 2 * number + 1))


def _wire(stack: ExitStack, name: str, there: str, number: int) -> NetworkLink:
    """Makes a link in subnet number `number` of 198.18.0.0/15, which is reserved for testing (RFC 2544)."""
    first, device = (198 << 24) + (18 << 16) + 4 * number, f"sl{number}"
    wire = NetworkLink(device, _dotted(first + 1), _dotted(first + 2))
    _ip("link", "add", device, "type", "veth", "peer", "name", there, "netns", name)
    # deletes the device at once, which otherwise happens some time after the namespace is deleted
    stack.callback(_ip, "link", "del", device)
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
