"""Where a rank waits for others: it listens on a port, and lets in who has the worker's key."""

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

MOST_AT_ONCE = 16  # who connects and says nothing holds a place for HANDSHAKE_S
BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Guest:
    """A rank that was let in. address: the rank's own, as this machine sees it."""

    caller: Caller
    link: socket.socket
    address: str


class Door:
    """Open for the length of a `with`. Connections that nobody has taken by then are closed."""

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
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread that listens
        self._listener.close()
        while not self._guests.empty():
            self._guests.get().link.close()

    def next(self, seconds: float) -> Guest | None:
        """Returns the next one who was let in; None if nobody was, in so many seconds."""
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
            pass  # whoever it was has gone, or said too little in time
        else:
            self._guests.put(Guest(caller, link, address))
            if self._closed:
                link.close()
            return
        finally:
            self._places.release()
        link.close()


def _plain(address: str) -> str:
    """Returns an address of IPv4 as such, where a socket for both versions shows it as one of IPv6."""
    return address.removeprefix("::ffff:")
