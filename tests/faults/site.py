"""A server to be broken: started whole or in parts, looked into, and compared with what it was before.

Knows processes, files and /stats; knows nothing of faults or of what clients asked.
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
from tests.e2e.held import Hold
from tests.e2e.server import ROOT, free_port
from tests.faults.netns import Host, other_host
from tests.faults.proxy import Proxy
from tests.patience import PATIENCE_S

Stats = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a server occupies, when idle."""

    processes: int
    rss_mb: float
    fds: int
    run_files: int  # in the run folder
    shm: frozenset[str]

    def grown(self, before: "Footprint") -> str:
        """In words; empty when nothing leaked. Memory may be warmer, but not by half."""
        wrong = []
        if self.processes != before.processes:
            wrong.append(f"{before.processes} → {self.processes} processes")
        if self.fds > before.fds:
            wrong.append(f"{before.fds} → {self.fds} fds")
        if self.rss_mb > 1.5 * before.rss_mb:
            wrong.append(f"{before.rss_mb:.0f} → {self.rss_mb:.0f} MB")
        if self.run_files > before.run_files:
            wrong.append(f"{before.run_files} → {self.run_files} files")
        if self.shm - before.shm:
            wrong.append(f"/dev/shm: {sorted(self.shm - before.shm)}")
        return ", ".join(wrong)


@dataclass
class Site:
    """`url` is where clients go, first of `urls`; `roots` are the processes that we started."""

    urls: list[str]
    folder: Path
    log: Path
    roots: list[subprocess.Popen[bytes]] = field(default_factory=list)
    proxy: Proxy | None = None
    host: Host | None = None  # another one, where the last of `urls` is
    hold: Hold | None = None  # of its workers, where a plan asks for it
    restart: Callable[[], None] | None = None  # starts the worker again, where nobody else does; or what `host` ran

    @property
    def url(self) -> str:
        return self.urls[0]

    def slowly(self, step_s: float | None) -> AbstractContextManager[None]:
        """Meanwhile a token takes its worker so long, or for ever, where the site can be held."""
        return self.hold.at(1, step_s) if self.hold else nullcontext()

    def release(self) -> None:
        if self.hold:
            self.hold.release()

    async def stats(self) -> Stats:
        """From whoever answers: a connection of its own each time, as some processes may be dead or stopped."""
        return (await self._get("/stats")).json()  # type: ignore[no-any-return]

    async def ready(self) -> bool:
        """All of them."""
        return all([(await self.readiness(url)).status_code == 200 for url in self.urls])

    async def readiness(self, url: str) -> httpx.Response:
        return await self._get("/ready", url)

    async def _get(self, path: str, *urls: str) -> httpx.Response:
        """From whom of `urls` answers; none given: of all."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for url in urls or self.urls:
                with suppress(httpx.TransportError):
                    async with httpx.AsyncClient(base_url=url, timeout=5.0) as http:
                        return await http.get(path)
            assert time.monotonic() < deadline, f"nobody answers {path}; see {self.log}"
            await asyncio.sleep(0.05)

    async def until(self, true: Callable[[Stats], bool], timeout: float = PATIENCE_S) -> Stats:
        deadline = time.monotonic() + timeout
        while not true(stats := await self.stats()):
            assert time.monotonic() < deadline, f"waited in vain: {stats}; see {self.log}"
            await asyncio.sleep(0.02)
        return stats

    async def until_ready(self) -> None:
        """By several connections in a row: each may meet another frontend."""
        good = 0
        while good < 4:
            good = good + 1 if await self.ready() else 0
            await asyncio.sleep(0.02)

    async def until_idle(self, timeout: float = PATIENCE_S) -> Stats:
        return await self.until(idle, timeout)

    async def worker(self) -> int:
        return int((await self.stats())["worker"]["pid"])

    async def frontends(self) -> dict[int, int]:
        """How many streams each has, by pid."""
        return {peer["pid"]: peer["streams"] for peer in (await self.stats())["frontends"]}

    def family(self) -> list[psutil.Process]:
        live = [psutil.Process(root.pid) for root in self.roots if root.poll() is None]
        return live + [child for root in live for child in root.children(recursive=True)]

    def footprint(self) -> Footprint:
        family = self.family()
        return Footprint(
            processes=len(family),
            rss_mb=sum(process.memory_info().rss for process in family) / 1e6,
            fds=sum(process.num_fds() for process in family),
            run_files=sum(path.is_file() for path in self.folder.rglob("*")),
            shm=frozenset(path.name for path in Path("/dev/shm").glob("sluice*")),
        )


def idle(stats: Stats) -> bool:
    pages = stats["pages"]
    busy = stats["running"] or stats["waiting"] or pages["owned"]
    return not busy and pages["free"] + pages["cached"] == pages["total"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to start it. `log` may be a device; `split`: worker and frontends by hand, with a proxy between;
    `distant`: by hand, too, over tcp:// with CURVE keys, one frontend beside the worker and one on another host;
    `held`: its workers can be held, and slowed down."""

    flags: tuple[str, ...] = ()
    split: bool = False
    distant: bool = False
    held: bool = False
    log: str = ""
    frontends: int = 2
    prepare: Callable[[Path], dict[str, str]] = lambda home: {}  # its home; gives environment


@contextmanager
def running(plan: Plan) -> Iterator[Site]:
    """Ready; afterwards SIGTERM, and no process is left. Raises AssertionError when one had to be killed."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True)))
        environment = plan.prepare(home)
        stack.callback(_unmount, home / "run")
        start = _distant if plan.distant else _split if plan.split else _whole
        site = start(plan, home, environment, stack)
        asyncio.run(_started(site, plan.frontends))
        yield site


async def _started(site: Site, frontends: int) -> None:
    try:
        await asyncio.wait_for(site.until_ready(), PATIENCE_S)
    except TimeoutError:
        raise AssertionError(f"did not start: {site.log.read_text()[-2000:]}") from None
    await site.until(lambda stats: len(stats["frontends"]) == frontends)


def _whole(plan: Plan, home: Path, environment: Mapping[str, str], stack: ExitStack) -> Site:
    port = free_port()
    site = Site([f"http://127.0.0.1:{port}"], home / "run", Path(plan.log or home / "log"), hold=_hold(plan, home))
    words = ["serve", *_MODEL, *_SPEECH, *_THREADS, "--port", str(port), "--frontends", str(plan.frontends)]
    _start(site, stack, environment, [*words, "--run-dir", str(home / "run"), *plan.flags])
    return site


def _hold(plan: Plan, home: Path) -> Hold | None:
    return Hold(home / "hold") if plan.held else None


def _split(plan: Plan, home: Path, environment: Mapping[str, str], stack: ExitStack) -> Site:
    ports = [free_port() for _ in range(plan.frontends)]
    site = Site([f"http://127.0.0.1:{port}" for port in ports], home / "run", home / "log", hold=_hold(plan, home))
    site.restart = lambda: _start(site, stack, environment, worker)
    worker = ["worker", *_MODEL, *_THREADS, "--run-dir", str(home / "run"), *plan.flags]
    _start(site, stack, environment, worker)
    site.proxy = stack.enter_context(Proxy(home / "run", home / "front"))
    for port in ports:
        words = ["frontend", *_MODEL, *_SPEECH, "--run-dir", str(home / "front"), "--port", str(port)]
        _start(site, stack, environment, words)
    return site


def _distant(plan: Plan, home: Path, environment: Mapping[str, str], stack: ExitStack) -> Site:
    host = stack.enter_context(other_host())
    make_keys(home / "keys", "worker", "frontend")
    ports = [free_port() for _ in range(4)]
    addresses = [f"tcp://{host.server.here}:{port}" for port in ports[:2]]
    wire = ["--request-address", addresses[0], "--event-address", addresses[1], "--curve-dir", str(home / "keys")]
    near, far = ("127.0.0.1", ports[2]), (host.clients.there, ports[3])
    site = Site([f"http://{ip}:{port}" for ip, port in (near, far)], home / "run", home / "log", host=host)

    def frontend(ip: str, port: int, where: Host | None) -> None:
        words = ["frontend", *_MODEL, *_SPEECH, *wire, "--host", ip, "--port", str(port)]
        _start(site, stack, environment, words, where)

    site.restart = lambda: frontend(*far, host)
    _start(site, stack, environment, ["worker", *_MODEL, *_THREADS, *wire, *plan.flags])
    frontend(*near, None)
    frontend(*far, host)
    return site


_MODEL = ("--model", "demo", "--served-model-name", "m")
_SPEECH = ("--chat-template", str(Path(__file__).with_name("tools.jinja")))  # the demo's own shows no tools
_POOL = ("--kv-cache-gb", "0.1")  # soon used up: what grows after that is no K/V
_THREADS = ("--threads", "1", "--worker-metrics-port", "0", *_POOL)


def _start(
    site: Site, stack: ExitStack, extra: Mapping[str, str], words: Sequence[str], host: Host | None = None
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    with site.log.open("ab") as out:
        entry = site.hold.entry if site.hold and words[0] != "frontend" else ("-m", "deploy.cli.main")
        command = [sys.executable, *entry, *words]
        process = subprocess.Popen(
            host.command(command) if host else command,
            cwd=ROOT, stdout=out, stderr=out, env=environment | dict(extra),
        )  # fmt: skip
    site.roots.append(process)
    stack.callback(_end, process, site.log)


def _unmount(folder: Path) -> None:
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


def _end(process: subprocess.Popen[bytes], log: Path) -> None:
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for child in family:
        with suppress(psutil.Error):
            child.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"did not end on SIGTERM; see {log}") from None
    left = psutil.wait_procs(family, timeout=PATIENCE_S)[1]
    assert not left, f"left behind: {left}"
