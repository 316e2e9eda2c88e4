"""Receives frames in a thread, so that no sender waits until this rank has computed.

Several steps of a pipeline are in flight, so a rank may get rows and orders while it computes an earlier step. If it
left them in the buffer of the connection, two ranks that send to each other could wait for one another forever, and
TCP would give up the connection after BROKEN_S (hosts/links.py).
"""

import socket
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue

from worker.ranks.frames import receive


class Inbox:
    """The frames that a connection has delivered, from the oldest to the newest."""

    def __init__(self, source: socket.socket) -> None:
        """Starts the thread. Nothing else may read from `source`."""
        self._source = source
        self._frames = SimpleQueue[bytes | None]()  # None: the connection has ended
        self._error: Exception = EOFError()
        threading.Thread(target=self._receive, name="inbox", daemon=True).start()

    def take(self) -> bytes:
        """Waits for the next frame. Raises EOFError when the other side has closed the connection, and OSError."""
        return self._checked(self._frames.get())

    def take_within(self, seconds: float) -> bytes | None:
        """Returns the next frame; None if there is none within `seconds`. Raises EOFError and OSError, see take()."""
        with suppress(Empty):
            return self._checked(self._frames.get(timeout=seconds))
        return None

    def _checked(self, frame: bytes | None) -> bytes:
        if frame is None:
            self._frames.put(None)  # for later calls
            raise self._error
        return frame

    def _receive(self) -> None:
        try:
            while True:
                self._frames.put(receive(self._source))
        except (EOFError, OSError) as error:
            self._error = error
        finally:
            self._frames.put(None)
