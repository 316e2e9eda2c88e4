"""A server under test: started whole or in parts, inspected, and compared with its state before a fault.

This module knows processes, files and /stats, but no faults or requests.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from deploy.cli.keygen import make_keys
from shared import grammar_trial
from tests.e2e.held import Hold
from tests.e2e.server import ROOT, free_port
from tests.faults.netns import Host, other_host
from tests.faults.proxy import Proxy
from tests.patience import PATIENCE_S

Stats = dict[str, Any]
MAX_GRAMMAR_CHILDREN = 2  # child processes of each frontend and each worker


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """The resources that an idle server uses.

    A child process that checks grammars starts with the first grammar and ends with a grammar that is too costly. These
    children are counted in `grammar_children` alone; their memory and their parents' sockets to them are left out.
    """

    processes: int
    grammar_children: int
    rss_mb: float
    fds: int
    run_files: int  # number of files in the run folder
    shm: frozenset[str]

    def growth(self, before: "ResourceUsage") -> str:
        """Describes what has grown; empty if nothing leaked. Memory may grow, but not by half."""
        grown = []
        if self.processes != before.processes:
            grown.append(f"{before.processes} → {self.processes} processes")
        if self.grammar_children > MAX_GRAMMAR_CHILDREN * self.processes:
            grown.append(f"{self.grammar_children} processes that check grammars")
        if self.fds > before.fds:
            grown.append(f"{before.fds} → {self.fds} fds")
        if self.rss_mb > 1.5 * before.rss_mb:
            grown.append(f"{before.rss_mb:.0f} → {self.rss_mb:.0f} MB")
        if self.run_files > before.run_files:
            grown.append(f"{before.run_files} → {self.run_files} files")
        if self.shm - before.shm:
            grown.append(f"/dev/shm: {sorted(self.shm - before.shm)}")
        return ", ".join(grown)


@dataclass
class ServerUnderTest:
    """A running server. processes: the processes that the test started, without their children"""

    urls: list[str]
    folder: Path
    log: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    proxy: Proxy | None = None
    host: Host | None = None  # the other host, on which the frontend of the last of `urls` runs
    hold: Hold | None = None  # holds or slows the server's workers, if the plan asks for it
    restart: Callable[[], None] | None = None  # restarts a killed process that has no launcher
    start_again: Callable[[], None] = lambda: None  # starts a whole server again, all of whose processes were killed

    @property
    def url(self) -> str:
        return self.urls[0]

    def slowly(self, step_s: float | None) -> AbstractContextManager[None]:
        """Inside the `with`, each token takes `step_s` seconds (None: it never comes), if the worker can be held."""
        return self.hold.at(1, step_s) if self.hold else nullcontext()

    def release(self) -> None:
        if self.hold:
            self.hold.release()

    async def stats(self) -> Stats:
        """Returns /stats of any frontend, over a new connection, because some processes may be dead or stopped."""
        return (await self._get("/stats")).json()  # type: ignore[no-any-return]

    async def ready(self) -> bool:
        """Whether all frontends are ready."""
        return all([(await self.readiness(url)).status_code == 200 for url in self.urls])

    async def readiness(self, url: str) -> httpx.Response:
        return await self._get("/ready", url)

    async def _get(self, path: str, *urls: str) -> httpx.Response:
        """Returns the first response from `urls` (default: the URLs of all frontends)."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for url in urls or self.urls:
                with suppress(httpx.TransportError):
                    async with httpx.AsyncClient(base_url=url, timeout=5.0) as http:
                        return await http.get(path)
            assert time.monotonic() < deadline, f"no frontend answers {path}; see {self.log}"
            await asyncio.sleep(0.05)

    async def until(self, condition: Callable[[Stats], bool], timeout: float = PATIENCE_S) -> Stats:
        deadline = time.monotonic() + timeout
        while not condition(stats := await self.stats()):
            assert time.monotonic() < deadline, f"timed out: {stats}; see {self.log}"
            await asyncio.sleep(0.02)
        return stats

    async def until_ready(self) -> None:
        """Waits for several ready answers in a row, because each connection may reach another frontend."""
        good = 0
        while good < 4:
            good = good + 1 if await self.ready() else 0
            await asyncio.sleep(0.02)

    async def until_idle(self, timeout: float = PATIENCE_S) -> Stats:
        return await self.until(idle, timeout)

    async def worker(self) -> int:
        return int((await self.stats())["worker"]["pid"])

    async def frontends(self) -> dict[int, int]:
        """The number of streams of each frontend, by pid."""
        return {peer["pid"]: peer["streams"] for peer in (await self.stats())["frontends"]}

    def process_tree(self) -> list[psutil.Process]:
        live = [psutil.Process(root.pid) for root in self.processes if root.poll() is None]
        return live + [child for root in live for child in root.children(recursive=True)]

    def resource_usage(self) -> ResourceUsage:
        tree = self.process_tree()
        children = [process for process in tree if grammar_trial.__name__ in " ".join(process.cmdline())]
        lasting = [process for process in tree if process not in children]
        return ResourceUsage(
            processes=len(lasting),
            grammar_children=len(children),
            rss_mb=sum(process.memory_info().rss for process in lasting) / 1e6,
            fds=sum(process.num_fds() for process in lasting) - len(children),
            run_files=sum(path.is_file() for path in self.folder.rglob("*")),
            shm=frozenset(path.name for path in Path("/dev/shm").glob("sluice*")),
        )


def idle(stats: Stats) -> bool:
    pages = stats["pages"]
    busy = stats["running"] or stats["waiting"] or pages["owned"]
    return not busy and pages["free"] + pages["cached"] == pages["total"]


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """How to start the server.

    log: a file or a device
    split: worker and frontends are started separately, with a proxy between them
    remote: the same over tcp:// with CURVE keys, without a proxy; one frontend is on another host than the worker
    held: the workers can be held and slowed down
    """

    flags: tuple[str, ...] = ()
    split: bool = False
    remote: bool = False
    held: bool = False
    log: str = ""
    frontends: int = 2
    model: str = "demo"
    prepare: Callable[[Path], dict[str, str]] = lambda home: {}  # gets the home folder, returns environment variables

    @property
    def named(self) -> tuple[str, ...]:
        """The flags that name the model."""
        return "--model", self.model, "--served-model-name", "m"

    @property
    def is_whole(self) -> bool:
        """Whether a single `sluice serve` starts all processes."""
        return not self.split and not self.remote


@contextmanager
def running(plan: ServerPlan) -> Iterator[ServerUnderTest]:
    """Starts the server, yields it ready, and stops it. Raises AssertionError if a process had to be killed."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True)))
        environment = plan.prepare(home)
        for folder in ("run", "kept"):
            stack.callback(_unmount, home / folder)
        start = _distant if plan.remote else _split if plan.split else _whole
        server = start(plan, home, environment, stack)
        asyncio.run(_started(server, plan.frontends))
        yield server


async def _started(server: ServerUnderTest, frontends: int) -> None:
    try:
        await asyncio.wait_for(server.until_ready(), PATIENCE_S)
    except TimeoutError:
        raise AssertionError(f"did not start: {server.log.read_text()[-2000:]}") from None
    await server.until(lambda stats: len(stats["frontends"]) == frontends)


def _whole(plan: ServerPlan, home: Path, environment: Mapping[str, str], stack: ExitStack) -> ServerUnderTest:
    port = free_port()
    server = ServerUnderTest(
        [f"http://127.0.0.1:{port}"], home / "run", Path(plan.log or home / "log"), hold=_hold(plan, home)
    )
    words = ["serve", *plan.named, *_SPEECH, *_THREADS, "--port", str(port), "--frontends", str(plan.frontends)]
    server.start_again = lambda: _start(
        server, stack, environment, [*words, "--run-dir", str(home / "run"), *plan.flags]
    )
    server.start_again()
    return server


def _hold(plan: ServerPlan, home: Path) -> Hold | None:
    return Hold(home / "hold") if plan.held else None


def _split(plan: ServerPlan, home: Path, environment: Mapping[str, str], stack: ExitStack) -> ServerUnderTest:
    ports = [free_port() for _ in range(plan.frontends)]
    server = ServerUnderTest(
        [f"http://127.0.0.1:{port}" for port in ports], home / "run", home / "log", hold=_hold(plan, home)
    )
    server.restart = lambda: _start(server, stack, environment, worker)
    worker = ["worker", *plan.named, *_THREADS, "--run-dir", str(home / "run"), *plan.flags]
    _start(server, stack, environment, worker)
    server.proxy = stack.enter_context(Proxy(home / "run", home / "front"))
    for port in ports:
        words = ["frontend", *plan.named, *_SPEECH, "--run-dir", str(home / "front"), "--port", str(port)]
        _start(server, stack, environment, words)
    return server


def _distant(plan: ServerPlan, home: Path, environment: Mapping[str, str], stack: ExitStack) -> ServerUnderTest:
    host = stack.enter_context(other_host())
    make_keys(home / "keys", "worker", "frontend")
    ports = [free_port() for _ in range(4)]
    addresses = [f"tcp://{host.server.here}:{port}" for port in ports[:2]]
    wire = ["--request-address", addresses[0], "--event-address", addresses[1], "--curve-dir", str(home / "keys")]
    near, far = ("127.0.0.1", ports[2]), (host.clients.there, ports[3])
    server = ServerUnderTest([f"http://{ip}:{port}" for ip, port in (near, far)], home / "run", home / "log", host=host)

    def frontend(ip: str, port: int, where: Host | None) -> None:
        words = ["frontend", *plan.named, *_SPEECH, *wire, "--host", ip, "--port", str(port)]
        _start(server, stack, environment, words, where)

    server.restart = lambda: frontend(*far, host)
    _start(server, stack, environment, ["worker", *plan.named, *_THREADS, *wire, *plan.flags])
    frontend(*near, None)
    frontend(*far, host)
    return server


# because the demo model's template does not support tools
_SPEECH = ("--chat-template", str(Path(__file__).with_name("tools.jinja")))
_POOL = ("--kv-cache-gb", "0.1")  # a pool so small that it is soon full, so that later growth of memory is not K/V
_THREADS = ("--threads", "1", "--worker-metrics-port", "0", *_POOL)


def _start(
    server: ServerUnderTest, stack: ExitStack, extra: Mapping[str, str], words: Sequence[str], host: Host | None = None
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    with server.log.open("ab") as out:
        entry = server.hold.entry if server.hold and words[0] != "frontend" else ("-m", "deploy.cli.main")
        command = [sys.executable, *entry, *words]
        process = subprocess.Popen(
            host.command(command) if host else command,
            cwd=ROOT, stdout=out, stderr=out, env=environment | dict(extra),
        )  # fmt: skip
    server.processes.append(process)
    stack.callback(_end, process, server.log)


def _unmount(folder: Path) -> None:
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


def _end(process: subprocess.Popen[bytes], log: Path) -> None:
    process_tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for child in process_tree:
        with suppress(psutil.Error):
            child.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"did not end on SIGTERM; see {log}") from None
    left = psutil.wait_procs(process_tree, timeout=PATIENCE_S)[1]
    assert not left, f"processes left behind: {left}"
