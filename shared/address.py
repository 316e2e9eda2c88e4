"""A worker's address: the two sockets behind `tcp://HOST:PORT` or `ipc:///FOLDER`.

Knows spelling only; resolves nothing and opens nothing.
"""

import ipaddress
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker listens. `name` is what people are shown."""

    name: str
    requests: str
    events: str

    @property
    def host(self) -> str:
        """The host's name if it has to be looked up; empty for a number and for ipc."""
        found = re.fullmatch(r"tcp://(.+):\d+", self.name)
        if not found:
            return ""
        try:
            ipaddress.ip_address(found[1].strip("[]"))
        except ValueError:
            return found[1]
        return ""

    def at(self, ip: str) -> "Address":
        """The same ports on a host that was looked up."""
        return parse(f"tcp://{ip}:{self.name.rpartition(':')[2]}")


def parse(text: str) -> Address:
    """`tcp://HOST:PORT`: requests on PORT, events on the next; `ipc:///FOLDER`: the sockets in that folder.

    Raises ValueError with the sentence that is wrong with it.
    """
    if text.startswith("ipc:///"):
        folder = text.removeprefix("ipc://").rstrip("/")
        return Address(f"ipc://{folder}", f"ipc://{folder}/requests.sock", f"ipc://{folder}/events.sock")
    found = re.fullmatch(r"tcp://([^:\s]+|\[[^\]\s]+\]):(\d{1,5})", text)
    if not found or not 0 < int(found[2]) < 65535:
        raise ValueError(f"a worker's address is tcp://HOST:PORT or ipc:///FOLDER, not {text!r}")
    return Address(text, text, f"tcp://{found[1]}:{int(found[2]) + 1}")


def parse_all(text: str) -> list[Address]:
    """Addresses between commas or spaces; an empty text names none. Raises ValueError."""
    return [parse(word) for word in re.split(r"[,\s]+", text) if word]
