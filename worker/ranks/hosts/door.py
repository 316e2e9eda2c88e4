"""Listens on a port for connections of other ranks, and accepts those that prove to have the worker's key."""

import logging
import queue
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from shared.config import ConfigError
from worker.ranks.hosts.handshake import Caller, Stranger, WrongKey, admit
from worker.ranks.hosts.links import prepare

log = logging.getLogger("sluice.ranks")

MOST_AT_ONCE = 16  # handshakes at the same time; a silent connection occupies a place for HANDSHAKE_S
BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Guest:
    """A rank whose connection was accepted. address: the rank's IP address, as this machine sees it."""

    caller: Caller
    link: socket.socket
    address: str


class Door:
    """Listens during a `with` block. At its end, accepted connections that next() has not returned are closed."""

    def __init__(self, port: int, secret: bytes) -> None:
        """Listens on all addresses of this machine. Raises ConfigError."""
        try:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._listener = socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            raise ConfigError(f"--rank-port: cannot listen on port {port}: {error.strerror}") from error
        self._secret = secret
        self._guests: queue.Queue[Guest] = queue.Queue()
        self._places = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._closed = False
        threading.Thread(target=self._listen, name="door", daemon=True).start()

    def __enter__(self) -> "Door":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept() of the listening thread
        self._listener.close()
        while not self._guests.empty():
            self._guests.get().link.close()

    def next(self, seconds: float) -> Guest | None:
        """Waits for the next rank that is accepted, and returns it; None if there is none within `seconds`."""
        try:
            return self._guests.get(timeout=seconds)
        except queue.Empty:
            return None

    def _listen(self) -> None:
        while not self._closed:
            try:
                link, address = self._listener.accept()
            except OSError:
                return
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(link, _plain(address[0])), name="door", daemon=True).start()
            else:
                link.close()

    def _admit(self, link: socket.socket, address: str) -> None:
        try:
            caller = admit(link, self._secret)
            prepare(link)
        except WrongKey:
            log.warning("refused a rank at %s: it has another key in --curve-dir", address)
        except Stranger:
            log.warning("refused a connection from %s: it is no rank of this version", address)
        except (OSError, EOFError):
            pass  # the other end has closed the connection, or did not finish the handshake in time
        else:
            self._guests.put(Guest(caller, link, address))
            if self._closed:
                link.close()
            return
        finally:
            self._places.release()
        link.close()


def _plain(address: str) -> str:
    """Returns an IPv4 address without the prefix that a dual-stack socket puts before it."""
    return address.removeprefix("::ffff:")
