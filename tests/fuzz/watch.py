"""Watches a running server: its processes, their memory, and how long other clients wait for a tiny answer."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.server import Server

STALL_S = 2.0
EVERY_S = 0.1
TINY = json.dumps({"model": "m", "prompt": "a", "max_tokens": 1, "temperature": 0, "ignore_eos": True})
ROLES = ("frontend", "worker")


class Watch:
    """A server under watch. Use `with watching(server) as watch`."""

    def __init__(self, server: Server) -> None:
        self.server, self.url = server, server.url
        self.stalls = 0  # how often a tiny request took more than STALL_S
        self._asked: float | None = None  # start of the current tiny request
        self._ended = threading.Event()
        self._pids = self.pids()

    def pids(self) -> dict[int, str]:
        """Returns pid → role of the launcher's children."""
        launcher = self.server.process.pid
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        found = {}
        for child in children:
            words = _read(f"/proc/{child}/cmdline").split(b"\0")
            found |= {int(child): role for role in ROLES if role.encode() in words}
        return found

    def memory(self) -> dict[str, float]:
        """Returns resident memory in MiB by role: the launcher, and all processes of each other role together."""
        sizes = dict.fromkeys(("launcher", *ROLES), 0.0)
        for pid, role in {self.server.process.pid: "launcher", **self.pids()}.items():
            for line in _read(f"/proc/{pid}/status").split(b"\n"):
                if line.startswith(b"VmRSS:"):
                    sizes[role] += int(line.split()[1]) / 1024
        return sizes

    def died(self) -> str:
        """Waits until dead processes are replaced. Returns which processes have died since the last call, or ""."""
        now = self.pids()
        gone = {pid: role for pid, role in self._pids.items() if pid not in now}
        if gone:
            roles = sorted(self._pids.values())
            self.server.until(lambda stats: sorted(self.pids().values()) == roles)
            self.server.until(lambda stats: any(worker["ready"] for worker in stats["workers"]))
            now = self.pids()
        self._pids = now
        return ", ".join(f"{role} {pid} died" for pid, role in gone.items())

    def stalled_since(self, stalls: int) -> str:
        """Returns a message if a tiny request waits too long, now or since `self.stalls` was `stalls`; else ""."""
        asked = self._asked
        waits = asked is not None and time.monotonic() - asked > STALL_S
        return f"others waited more than {STALL_S} s" if waits or self.stalls > stalls else ""

    def probe(self) -> None:
        """Requests /health, and sometimes a token, until the watch ends."""
        there, count = urlsplit(self.url), 0
        while not self._ended.wait(EVERY_S):
            count += 1
            headers = {"Content-Type": "application/json", **self.server.headers}
            wire = http.client.HTTPConnection(str(there.hostname), there.port, timeout=30)
            self._asked = time.monotonic()
            try:
                if count % 5:
                    wire.request("GET", "/health")
                else:
                    wire.request("POST", "/v1/completions", TINY, headers)
                wire.getresponse().read()
            except (OSError, http.client.HTTPException):
                pass  # a process died, and died() reports it
            took, self._asked = time.monotonic() - self._asked, None
            wire.close()
            self.stalls += took > STALL_S

    def stop(self) -> None:
        self._ended.set()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""  # the process has just ended


@contextmanager
def watching(server: Server) -> Iterator[Watch]:
    watch = Watch(server)
    thread = threading.Thread(target=watch.probe, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.stop()
        thread.join()


def run_dir(stats: dict[str, Any]) -> Path:
    """Returns the folder with the sockets of a server's first worker."""
    return Path(stats["workers"][0]["address"].removeprefix("ipc://")).parent
