"""A worker whose second rank is started separately, as on another host, gives the bytes of one process.

Both ranks run on this machine and communicate over TCP. Where the system allows network namespaces, the second rank is
behind a simulated cable that a test can unplug.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from deploy.cli.main import main
from tests.checkpoints import Checkpoints
from tests.e2e.server import ROOT, Server, serving
from tests.e2e.test_ranks import FLAGS, TOKENS, answers, expected, pids
from tests.patience import PATIENCE_S
from tests.worker.distributed.test_rendezvous import free_ports

__all__ = ["expected"]  # a fixture

GROUP = ("--rank-group", "torchrun", "--tensor-parallel-size", "2")
OPEN_GROUP = (*GROUP, "--insecure")


@dataclass
class Host:
    """Keeps rank 1 running, as systemd or Kubernetes would on its host. codes: exit codes of its processes"""

    command: list[str]
    log: Path
    codes: list[int] = field(default_factory=list)
    process: "subprocess.Popen[bytes] | None" = None
    stopped: bool = False

    @contextmanager
    def running(self) -> Iterator["Host"]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self.stopped = True
            while thread.is_alive():
                if self.process is not None:
                    self.process.kill()
                thread.join(0.2)

    def _run(self) -> None:
        with self.log.open("wb") as out:
            while not self.stopped:
                self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
                self.codes.append(self.process.wait())


def environment(rank: int, address: str, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}


@contextmanager
def two_hosts(
    model: Path,
    folder: Path,
    address: str = "127.0.0.1",
    within: tuple[str, ...] = (),
    stall_s: int = 5,
    ranks: tuple[str, ...] = GROUP,
    first: tuple[str, ...] = (),
) -> Iterator[tuple[Server, Host]]:
    """Yields a server with rank 0, and the host of rank 1. within: prefix of commands that run on the second host

    ranks: flags of both ranks. first: further flags of rank 0.
    """
    assert main(["keygen", str(folder / "keys")]) == 0
    port, group = free_ports(2), (*ranks, "--curve-dir", str(folder / "keys"))
    words = [sys.executable, "-m", "deploy.cli.main", "worker", str(model), "--threads", "1", *FLAGS[:2], *group]
    second = ["env", *(f"{name}={value}" for name, value in environment(1, address, port).items()), *words]
    with pytest.MonkeyPatch.context() as patch, Host([*within, *second], folder / "rank-1").running() as host:
        for name, value in environment(0, address, port).items():
            patch.setenv(name, value)
        flags = (*FLAGS, *group, "--stall-timeout", str(stall_s), *first)
        with serving(model, folder / "log", *flags, held=True) as server:
            yield server, host


@pytest.fixture(scope="module")
def hosts(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Host]]:
    with two_hosts(checkpoints("llama"), tmp_path_factory.mktemp("hosts")) as both:
        yield both


def in_the_middle(server: Server, expected: list[list[int]], strike: Callable[[], object]) -> None:
    """Asserts that streams have the expected bytes, although `strike` is called while they run."""
    with ThreadPoolExecutor(1) as pool, server.hold.at(TOKENS // 2):
        running = pool.submit(answers, server)
        server.hold.wait()
        strike()
        server.hold.release()
        assert running.result() == expected


def test_rank_of_another_host_gives_the_bytes_of_one_process(
    hosts: tuple[Server, Host], expected: list[list[int]]
) -> None:
    server, host = hosts
    assert answers(server) == expected
    assert host.process is not None and pids(server)[1] == host.process.pid


@pytest.mark.parametrize("rank", [0, 1])
def test_streams_go_on_when_the_rank_of_a_host_is_killed(
    hosts: tuple[Server, Host], expected: list[list[int]], rank: int
) -> None:
    server, host = hosts
    before, codes = pids(server), len(host.codes)
    in_the_middle(server, expected, lambda: os.kill(before[rank], signal.SIGKILL))
    assert not {*before} & {*pids(server)}
    assert host.codes[codes] == (1 if rank == 0 else -signal.SIGKILL)
    assert "rank 0 has ended" in host.log.read_text() or rank == 1


def test_stage_of_another_host_gives_the_bytes_of_one_process_and_may_die(
    checkpoints: Checkpoints, tmp_path: Path, expected: list[list[int]]
) -> None:
    """The pools have their default size, which the free memory of both hosts decides."""
    stages = ("--rank-group", "torchrun", "--pipeline-parallel-size", "2", "--kv-cache-gb", "0", "--max-seq-len", "512")
    with two_hosts(checkpoints("llama"), tmp_path, ranks=stages) as (server, host):
        assert answers(server) == expected
        for rank in (0, 1):
            before = pids(server)
            in_the_middle(server, expected, partial(os.kill, before[rank], signal.SIGKILL))
            assert not {*before} & {*pids(server)}
        assert host.codes[:2] == [1, -signal.SIGKILL]


def test_rank_that_is_to_end_computes_until_rank_0_ends(hosts: tuple[Server, Host], expected: list[list[int]]) -> None:
    """If all ranks are stopped together, SIGTERM reaches them at once, while rank 0 still has answers to finish."""
    server, host = hosts
    before, codes = pids(server), len(host.codes)
    in_the_middle(server, expected, lambda: os.kill(before[1], signal.SIGTERM))
    assert pids(server) == before
    os.kill(before[0], signal.SIGKILL)
    server.until(lambda stats: len(host.codes) > codes)
    assert host.codes[codes] == 0
    server.until(lambda stats: before[0] not in [rank["pid"] for rank in stats["workers"][0]["ranks"]])
    assert not {*before} & {*pids(server)}


@contextmanager
def workers(folder: Path, *models: Path) -> "Iterator[list[subprocess.Popen[bytes]]]":
    """Starts ranks together without a launcher, each with its own checkpoint."""
    port = free_ports(2)
    words = [sys.executable, "-m", "deploy.cli.main", "worker", "--threads", "1", *FLAGS[:2], *OPEN_GROUP]
    started = [
        subprocess.Popen(
            [*words, "--run-dir", str(folder), str(model)], cwd=ROOT, stderr=subprocess.PIPE,
            env=os.environ | environment(rank, "127.0.0.1", port),
        )
        for rank, model in enumerate(models)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for one in started:
            one.kill()
            one.communicate()


def end_of(process: "subprocess.Popen[bytes]") -> tuple[int, str]:
    _, told = process.communicate(timeout=PATIENCE_S)
    return process.returncode, told.decode().splitlines()[-1]


def test_rank_with_another_checkpoint_is_told_so_and_not_waited_with(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with workers(tmp_path, checkpoints("llama"), checkpoints("qwen3")) as (leader, other):
        code, told = end_of(other)
        assert code == 1 and told.startswith("sluice worker: rank 1 has the checkpoint fp_")
        assert leader.poll() is None, "it waits for the right one"


def test_rank_whose_weights_have_another_bit_ends_rank_0_before_it_serves(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoints("llama"), tmp_path / "m"))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with workers(tmp_path, checkpoints("llama"), folder) as (leader, other):
        assert end_of(leader) == (2, "sluice worker: --model: rank 1 has read other weights than rank 0")
        assert end_of(other) == (1, "sluice worker: rank 0 has ended")


@pytest.mark.parametrize(
    ("command", "variables", "words"),
    [
        ("worker", {}, "--rank-group torchrun reads the variable WORLD_SIZE, which is not set"),
        ("serve", environment(1, "h", 1), "this is rank 1, which serves nobody: start it with `sluice worker`"),
    ],
)
def test_wrong_variables_end_the_command_with_one_sentence(
    command: str, variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in environment(0, "", 0):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([command, "demo", *OPEN_GROUP]) == 2
    assert capsys.readouterr().err == f"sluice {command}: {words}\n"


def shell(*words: str) -> bool:
    return subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


@dataclass(frozen=True)
class Namespace:
    """A second host with a cable to this host. The address belongs to this end of the cable."""

    name: str
    address: str

    def plug(self, state: str) -> None:
        assert shell("ip", "-n", self.name, "link", "set", "cable", state)


@contextmanager
def namespace() -> Iterator[Namespace | None]:
    """A network namespace; None where the system has none, or does not allow this user to make one."""
    number = os.getpid() % 250
    name, outer, net = f"sluice-{number}", f"sluice{number}", f"10.201.{number}"
    made = (
        shell("ip", "netns", "add", name)
        and shell("ip", "link", "add", outer, "type", "veth", "peer", "name", "cable", "netns", name)
        and shell("ip", "addr", "add", f"{net}.1/24", "dev", outer)
        and shell("ip", "link", "set", outer, "up")
        and shell("ip", "-n", name, "addr", "add", f"{net}.2/24", "dev", "cable")
        and shell("ip", "-n", name, "link", "set", "cable", "up")
    )
    try:
        yield Namespace(name, f"{net}.1") if made else None
    finally:
        shell("ip", "netns", "del", name)


def test_streams_go_on_when_the_link_between_two_hosts_was_broken(
    checkpoints: Checkpoints, tmp_path: Path, expected: list[list[int]]
) -> None:
    """The hosts are two network namespaces. Neither end is told of the broken link; both notice it in bounded time."""
    with namespace() as second:
        if second is None:
            pytest.skip("this system has no network namespaces for this user")
        within = ("ip", "netns", "exec", second.name)
        with two_hosts(checkpoints("llama"), tmp_path, second.address, within, 60) as (server, host):
            assert answers(server) == expected
            before, begun = pids(server), time.monotonic()

            def broken() -> None:
                second.plug("down")
                threading.Thread(target=mend).start()

            def mend() -> None:
                while not host.codes and time.monotonic() < begun + PATIENCE_S:
                    time.sleep(0.1)
                second.plug("up")

            in_the_middle(server, expected, broken)
            assert host.codes[0] == 1 and not {*before} & {*pids(server)}
            assert "the connection to rank 0 has broken" in host.log.read_text()
            told = server.log.read_text()
            assert re.search(r"connection( to rank 1)? has broken: ", told) and "worker hangs" not in told
