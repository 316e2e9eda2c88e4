"""A launcher in its own process, whose children are scripts: real sockets, signals and run folder."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.patience import PATIENCE_S

PROGRAM = """
import os
import sys
from deploy.launcher import child_command
from deploy.cli.main import main

def command(role, settings, flags):
    return [sys.executable, "-c", CHILD, role, f"--parent={os.getpid()}"]

CHILD = '''
import os, signal, socket, sys
from deploy.launcher.child_command import die_with
die_with(int(sys.argv[2].partition("=")[2]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("pid", os.getpid(), flush=True)
if sys.argv[1] == "worker":
    print("epoch", os.environ["SLUICE_EPOCH"], flush=True)
    while True:
        signal.pause()
listener = socket.socket(fileno=int(sys.argv[3].partition("=")[2]))
listener.setblocking(True)
while True:
    client, _ = listener.accept()
    client.recv(4096)
    client.sendall(b"HTTP/1.1 200 OK\\\\r\\\\n\\\\r\\\\n{}")
    client.close()
'''
child_command.command_line = command
sys.exit(main(sys.argv[1:]))
"""


class Launcher:
    """The launcher's process, its log, and the folder for its temporary files."""

    def __init__(self, folder: Path, temporary: Path, *argv: str, streams: str = "") -> None:
        """`streams`: shell redirections of the launcher."""
        self.log, self.temporary = folder / "log", temporary
        for name in ("config.json", "model.safetensors"):
            (folder / name).touch()
        environment = os.environ | {"PYTHONPATH": os.getcwd(), "TMPDIR": str(temporary)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", f'exec "$@" {streams}', "sh",
                 sys.executable, "-c", PROGRAM, "serve", "--model", str(folder), "--port=0", *argv],
                stdout=log, stderr=log, env=environment,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.log.read_text()

    def until(self, pattern: str, count: int = 1) -> list[str]:
        """Waits until a pattern has occurred `count` times; fails at once if the launcher ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ended = self.process.poll() is not None
            if len(found := re.findall(pattern, self.text)) >= count:
                return found
            assert not ended and time.monotonic() < deadline, self.text
            time.sleep(0.02)

    def pids(self, count: int) -> list[int]:
        return [int(pid) for pid in self.until(r"pid (\d+)\n", count)]


@contextlib.contextmanager
def launcher(folder: Path, *argv: str, streams: str = "") -> Iterator[Launcher]:
    """Runs a launcher. folder: for its model and its log; its sockets are elsewhere, as their paths must be short"""
    with TemporaryDirectory(prefix="s-", dir="/tmp") as temporary:
        started = Launcher(folder, Path(temporary), *argv, streams=streams)
        try:
            yield started
        finally:
            started.process.kill()
            started.process.wait(PATIENCE_S)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while still := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, still
        time.sleep(0.02)
