"""The command as a person meets it: help, mistakes, exit codes; and a whole server with scripts for children."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.supervisor.listen_sockets import is_taken, listen, reachable
from tests.patience import PATIENCE_S

SLUICE = [sys.executable, "-m", "deploy.cli.main"]


def sluice(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SLUICE, *argv], capture_output=True, text=True, timeout=PATIENCE_S)


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main.main(argv)
    return code, capsys.readouterr().err.strip()


def test_help_needs_none_of_the_heavy_libraries() -> None:
    check = (
        "import sys; from deploy.cli.main import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'asyncio', 'starlette', 'zmq', 'msgspec', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "--prefill-chunk-size" in done.stdout


def test_without_a_command_it_says_which_there_are() -> None:
    done = sluice()
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("serve", "worker", "frontend", "bench"))


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["srve"], 2, "sluice: there is no command 'srve'; did you mean serve?"),
        (["nonsense"], 2, "'nonsense'; see sluice --help"),
        (["--port", "80"], 2, "sluice: --port must follow a command, as in `sluice serve --port`"),
        (["serve", "--prot", "1"], 2, "sluice serve: unknown flag --prot; did you mean --port?"),
        (["serve", "--batching-mode", "static", "--use-chunked-prefill"], 2, "--use-chunked-prefill"),
        (["serve", "--model", "/no/such/folder"], 3, "--model /no/such/folder: there is no such folder"),
        (["serve", "--model", "./missing"], 3, "--model ./missing"),
        (["serve", "/no/such/folder"], 3, "--model /no/such/folder: there is no such folder"),
        (["serve", "--port=0", "/no/such/folder", "--insecure"], 3, "--model /no/such/folder: there is no such folder"),
        (["serve", "demo", "other"], 2, "unexpected argument 'other'"),
        (["serve", "demo", "--model=other"], 2, "'demo' and --model both name the model"),
        (["serve", "--model", ".", "--run-dir", "/" + "x" * 120], 1, "--run-dir"),
        (["worker"], 2, "--run-dir"),
        (["frontend"], 2, "--run-dir"),
        (["worker", "--frontends", "2"], 2, "unknown flag --frontends"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, words: str
) -> None:
    got, text = said(capsys, *argv, *(["--port", "0"] if argv[0] == "serve" and "." in argv else []))
    assert got == code
    assert re.search(words.replace("?", r"\?"), text), text
    assert "\n" not in text


def test_a_mistake_in_the_environment_is_one_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_PORT", "eighty")
    assert said(capsys, "serve") == (2, "sluice serve: SLUICE_PORT must be a whole number, not 'eighty'")


def test_a_taken_port_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    [listener] = listen("127.0.0.1", 0)
    with listener:
        port = reachable(listener)[1]
        code, text = said(capsys, "serve", "--model", str(tmp_path), "--port", str(port))
        assert (code, text.startswith(f"sluice serve: port {port} is already in use")) == (1, True)
        code, text = said(capsys, "serve", "--model", str(tmp_path), "--port", "0", "--worker-metrics-port", str(port))
        assert (code, text.startswith(f"sluice serve: port {port} is already in use")) == (1, True)


# A server whose children are scripts: the real launcher, sockets, signals and run folder.

LAUNCHER = """
import os
import sys
from deploy.supervisor import child_command
from deploy.cli.main import main

def command(role, settings, flags):
    return [sys.executable, "-c", CHILD, role, f"--parent={os.getpid()}"]

CHILD = '''
import os, signal, socket, sys
from deploy.supervisor.parent_death import die_with
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


class Server:
    """A launcher in a process of its own, and the processes under it."""

    def __init__(self, folder: Path, *argv: str, streams: str = "") -> None:
        """`streams`: what a shell makes of them."""
        self.log = folder / "log"
        environment = os.environ | {"PYTHONPATH": os.getcwd(), "TMPDIR": str(folder)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", f'exec "$@" {streams}', "sh",
                 sys.executable, "-c", LAUNCHER, "serve", "--model", str(folder), "--port=0", *argv],
                stdout=log, stderr=log, env=environment,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.log.read_text()

    def until(self, pattern: str, count: int = 1) -> list[str]:
        deadline = time.monotonic() + PATIENCE_S
        while len(found := re.findall(pattern, self.text)) < count:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)
        return found

    def pids(self, count: int) -> list[int]:
        return [int(pid) for pid in self.until(r"pid (\d+)\n", count)]


@contextlib.contextmanager
def server(folder: Path, *argv: str, streams: str = "") -> Iterator[Server]:
    started = Server(folder, *argv, streams=streams)
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


def test_a_server_comes_up_restarts_its_worker_and_goes_down_clean(tmp_path: Path) -> None:
    with server(tmp_path, "--frontends=2") as run:
        run.until("is ready at http://127.0.0.1")
        pids = run.pids(3)
        [worker] = [int(pid) for pid in re.findall(r"worker +\| pid (\d+)", run.text)]
        os.kill(worker, signal.SIGKILL)
        run.until("worker was killed by SIGKILL; restarting in 0.5 s")
        run.until("epoch 2")
        assert "epoch 1" in run.text
        [folder] = tmp_path.glob("sluice-run-*")
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(PATIENCE_S) == 0, run.text
        until_dead([*pids, *run.pids(4)])
        assert not folder.exists()


def test_a_server_needs_none_of_its_streams_open(tmp_path: Path) -> None:
    [listener] = listen("127.0.0.1", 0)
    port = reachable(listener)[1]
    listener.close()
    with server(tmp_path, f"--port={port}", streams="<&- >&- 2>&-") as run:
        deadline = time.monotonic() + PATIENCE_S
        while run.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as client:
                client.sendall(b"GET / HTTP/1.1\r\n\r\n")
                client.settimeout(1)
                if client.recv(15) == b"HTTP/1.1 200 OK":
                    break
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(PATIENCE_S) == 0


def test_nothing_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    with server(tmp_path, "--frontends=2") as run:
        pids = run.pids(3)
        [port] = {int(port) for port in run.until(r"ready at http://127.0.0.1:(\d+)")}
        run.process.kill()
        until_dead(pids)
        run.process.wait(PATIENCE_S)
        assert not is_taken("127.0.0.1", port)
