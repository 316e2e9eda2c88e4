"""The address of a worker: the two sockets of `tcp://HOST:PORT` or `ipc:///FOLDER`.

Knows the syntax only; resolves nothing and opens nothing.
"""

import ipaddress
import os
import re
from dataclasses import dataclass

LONGEST_SOCKET_PATH = 107  # bytes: the system's limit


def check_socket_path(address: str) -> None:
    """Raises ValueError, whose message is a sentence, if `address` is ipc:// with a path that is too long for a socket:
    it could never be connected.
    """
    path = address.removeprefix("ipc://")
    if path != address and (size := len(os.fsencode(path))) > LONGEST_SOCKET_PATH:
        raise ValueError(f"{path} has {size} bytes, but the path of a socket has at most {LONGEST_SOCKET_PATH}")


@dataclass(frozen=True, slots=True)
class Address:
    """The addresses of a worker's two sockets, and `name`, the address as users wrote it."""

    name: str
    requests: str
    events: str

    @property
    def host(self) -> str:
        """The host, if it is a name to look up; empty for an IP address and for ipc."""
        match = re.fullmatch(r"tcp://(.+):\d+", self.name)
        if not match:
            return ""
        try:
            ipaddress.ip_address(match[1].strip("[]"))
        except ValueError:
            return match[1]
        return ""

    def at(self, ip: str) -> "Address":
        """Returns this address with its host replaced by `ip`; the ports stay."""
        return parse(f"tcp://{ip}:{self.name.rpartition(':')[2]}")


def parse(text: str) -> Address:
    """Parses a worker's address. Raises ValueError, whose message is a sentence.

    `tcp://HOST:PORT` takes requests on PORT and sends events on PORT + 1; `ipc:///FOLDER` has both sockets in FOLDER.
    """
    if text.startswith("ipc:///"):
        folder = text.removeprefix("ipc://").rstrip("/")
        address = Address(f"ipc://{folder}", f"ipc://{folder}/requests.sock", f"ipc://{folder}/events.sock")
        check_socket_path(address.requests)
        return address
    match = re.fullmatch(r"tcp://([^:\s]+|\[[^\]\s]+\]):(\d{1,5})", text)
    if not match or not 0 < int(match[2]) < 65535:
        raise ValueError(f"a worker's address is tcp://HOST:PORT or ipc:///FOLDER, not {text!r}")
    return Address(text, text, f"tcp://{match[1]}:{int(match[2]) + 1}")


def with_port_offset(endpoint: str, offset: int) -> str:
    """Returns tcp://HOST:PORT with another port; HOST may be `*`. Raises ValueError, whose message ends a sentence."""
    match = re.fullmatch(r"tcp://([^:\s]+|\[[^\]\s]+\]):(\d{1,5})", endpoint)
    if not match:
        raise ValueError(f"must be tcp://HOST:PORT, not {endpoint!r}")
    if not 0 < int(match[2]) <= 65535 - offset:
        raise ValueError(f"{endpoint!r}: the ports of {offset + 1} workers must be 1 to 65535")
    return f"tcp://{match[1]}:{int(match[2]) + offset}"


def parse_all(text: str) -> list[Address]:
    """Parses addresses separated by commas or spaces; returns [] for an empty text. Raises ValueError."""
    return [parse(word) for word in re.split(r"[,\s]+", text) if word]
