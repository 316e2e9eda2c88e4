"""The manager with a supervisor that starts no process: loads, unloads in two steps, and failures."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.launcher import many_manager as managers
from deploy.launcher.child import ChildSpec, start_process
from deploy.launcher.many_manager import MOST_STARTS, Manager
from deploy.launcher.many_plan import plan
from deploy.launcher.many_sizes import FetchFailed, HubModels
from frontend import launcher_link
from frontend.launcher_link import LauncherLink
from shared.config.settings import Settings, with_values
from shared.launcher_messages import Keep, Load, Sleep, Unusable
from tests.frontend.serving import until


@dataclass(eq=False)
class FakeChild:
    """A worker as the manager sees it. `end` simulates its exit, which is final or makes the supervisor restart it."""

    spec: ChildSpec
    is_final: Callable[[Any, int], bool]
    done: "asyncio.Future[int]"
    incarnation: int = 1
    last_error: str = ""
    was_ready: bool = False
    stopped: bool = False

    def mark_ready(self) -> None:
        self.was_ready = True

    def stop(self) -> None:
        self.stopped = True

    def serve(self) -> None:
        self.spec.watchdog.serving = True  # type: ignore[union-attr, misc]

    def end(self, code: int, error: str = "") -> None:
        self.last_error = error
        if self.stopped or self.is_final(self, code):
            self.done.set_result(code)
        else:
            self.incarnation += 1


@dataclass
class FakeSupervisor:
    children: list[FakeChild] = field(default_factory=list)

    def start_beside(self, spec: ChildSpec, is_final: Any) -> tuple[FakeChild, "asyncio.Task[int]"]:
        async def run() -> int:
            return await child.done

        child = FakeChild(spec, is_final, asyncio.get_running_loop().create_future())
        self.children.append(child)
        return child, asyncio.create_task(run())

    def request_stop(self, code: int) -> None: ...


@dataclass
class FakeSpare:
    waits: bool = False

    def prepare(self) -> None:
        self.waits = True

    async def close(self) -> None:
        self.waits = False

    start = staticmethod(start_process)


@dataclass
class Managed:
    """A manager of models `a` and `b` with memory for one model, and a frontend's connection to the manager."""

    folder: Path
    link: LauncherLink
    supervisor: FakeSupervisor
    spare: "FakeSpare"

    async def until_state(self, name: str, state: str) -> None:
        await until(lambda: name in self.link.states and self.link.states[name].state == state)

    async def child(self, count: int) -> FakeChild:
        await until(lambda: len(self.supervisor.children) == count)
        return self.supervisor.children[-1]


@pytest.fixture
async def managed(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Managed]:
    monkeypatch.setattr(launcher_link, "LINGER_S", 0.0)
    monkeypatch.setattr(managers, "TICK_S", 0.005)
    folder = socket_folder
    (folder / "models.toml").write_text('[models.a]\nmodel="demo"\n[models.b]\nmodel="demo"')
    given = {"models": str(folder / "models.toml"), "run_dir": str(folder), "device": "cpu", "memory_gb": 8.0}
    planned = plan(with_values(Settings(), {**given, "max_loaded_models": 1, "keep_alive": "-1"}), given.keys())
    supervisor = FakeSupervisor()

    def make_spec(worker: Any) -> ChildSpec:
        watchdog = SimpleNamespace(serving=False, start=lambda: None)
        epoch = lambda n: {"SLUICE_EPOCH": str(n)}  # noqa: E731
        return ChildSpec(worker.name, lambda _: [], epoch, watchdog=watchdog)  # type: ignore[arg-type]

    manager = Manager(planned, supervisor, make_spec, lambda _: None, spare := FakeSpare())  # type: ignore[arg-type]
    running = asyncio.create_task(manager.run())
    await until(lambda: (folder / "models.sock").exists())
    link = LauncherLink(Path(folder), lambda: None)
    linked = asyncio.create_task(link.run())
    await until(lambda: link.connected)
    yield Managed(folder, link, supervisor, spare)
    linked.cancel()
    await asyncio.gather(linked, return_exceptions=True)
    await until(lambda: not manager._control._frontends)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_model_with_requests_stays_and_goes_only_after_them(managed: Managed) -> None:
    link = managed.link
    with link.wanting("a"):
        a = await managed.child(1)
        await managed.until_state("a", "loading")
        a.serve()
        await managed.until_state("a", "loaded")
        link.use("a")
    with link.wanting("b"):
        await asyncio.sleep(0.05)
        assert not a.stopped and len(managed.supervisor.children) == 1, "it has a request"
        link.release("a")
        await until(lambda: a.stopped)
        assert link.states["a"].state == "unloading", "every frontend knew before its worker was stopped"
        assert len(managed.supervisor.children) == 1, "its memory counts until its process has ended"
        a.end(0)
        b = await managed.child(2)
        b.serve()
        await managed.until_state("b", "loaded")
        assert link.states["a"].state == "unloaded"


async def test_a_worker_killed_while_its_model_is_unloaded_frees_the_place(managed: Managed) -> None:
    link = managed.link
    with link.wanting("a"):
        a = await managed.child(1)
        a.serve()
        await managed.until_state("a", "loaded")
    with link.wanting("b"):
        await until(lambda: a.stopped)
        a.end(-9)
        (await managed.child(2)).serve()
        await managed.until_state("b", "loaded")
        assert link.states["a"].state == "unloaded"


async def test_a_worker_that_never_serves_fails_and_one_that_served_is_started_again(managed: Managed) -> None:
    link = managed.link
    with link.wanting("a"):
        a = await managed.child(1)
        for _ in range(MOST_STARTS):
            assert link.states["a"].state != "failed"
            a.end(1, "no weights")
        await managed.until_state("a", "failed")
        assert link.states["a"].reason == "no weights"
    with link.wanting("b"):
        b = await managed.child(2)
        b.serve()
        await managed.until_state("b", "loaded")
        for _ in range(2 * MOST_STARTS):
            b.end(-9)
        assert not b.done.done() and link.states["b"].state == "loaded"


@pytest.mark.parametrize("state", ["loading", "loaded"])
async def test_a_model_that_frontends_cannot_serve_has_failed_when_its_worker_has_ended(
    state: str, managed: Managed
) -> None:
    with managed.link.wanting("a"):
        a = await managed.child(1)
        if state == "loaded":
            a.serve()
        await managed.until_state("a", state)
        managed.link.order(Unusable("a", "its tokenizer is broken"))
        await until(lambda: a.stopped)
        assert managed.link.states["a"].state == state, "its memory is still in use"
        a.end(0)
        await managed.until_state("a", "failed")
    assert managed.link.states["a"].reason == "its tokenizer is broken" and len(managed.supervisor.children) == 1


async def test_epochs_of_a_model_never_come_again(managed: Managed) -> None:
    epochs = set()
    for count in range(1, 4):
        with managed.link.wanting("a"):
            child = await managed.child(count)
            child.serve()
            await managed.until_state("a", "loaded")
        epochs.add(child.spec.environment(child.incarnation)["SLUICE_EPOCH"])
        managed.link.order(Keep("a", 0.0))
        await until(lambda child=child: child.stopped)
        child.end(0)
        await managed.until_state("a", "unloaded")
    assert len(epochs) == 3


async def test_a_table_that_is_read_again_holds_for_the_next_load(managed: Managed) -> None:
    """A model with a changed entry is unloaded, and loaded again only after every frontend has seen the unloading."""
    link, seen = managed.link, list[str]()
    with link.wanting("a"):
        first = await managed.child(1)
        first.serve()
        await managed.until_state("a", "loaded")
    table = managed.folder / "models.toml"
    table.write_text("models = 1")
    assert "models.toml" in await link.reload()
    assert [*link.states] == ["a", "b"], "what cannot be read changes nothing"
    link._changed = lambda: seen.append(link.states["a"].state)
    table.write_text('[models.c]\nmodel="demo"\npreload=true\n[models.a]\nmodel="demo"\naliases=["x"]')
    assert (await link.reload(), [*link.states], link.reading) == ("", ["c", "a"], 2)
    await until(lambda: first.stopped)
    first.end(0)
    (await managed.child(2)).serve()
    await managed.until_state("c", "loaded")
    assert "unloaded" in seen


async def test_a_server_that_sleeps_has_no_model_and_loads_them_again_when_it_wakes(managed: Managed) -> None:
    link = managed.link
    with link.wanting("a"):
        first = await managed.child(1)
        first.serve()
        await managed.until_state("a", "loaded")
        link.use("a")
    link.order(Sleep(True))
    await until(lambda: link.asleep)
    await asyncio.sleep(0.05)
    assert not first.stopped, "a request computes with it"
    assert not managed.spare.waits, "its memory is free, too"
    link.release("a")
    await until(lambda: first.stopped)
    first.end(0)
    await managed.until_state("a", "unloaded")
    with link.wanting("b"):
        await asyncio.sleep(0.05)
        assert len(managed.supervisor.children) == 1
    link.order(Sleep(False))
    (await managed.child(2)).serve()
    await managed.until_state("a", "loaded")
    await until(lambda: managed.spare.waits)
    assert not link.asleep


async def test_a_model_on_the_hub_is_fetched_before_it_is_counted(
    managed: Managed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch delays no other model and is shown as loading. A failed fetch has a reason and can be tried again."""
    link, fetched = managed.link, list[str]()
    go: asyncio.Queue[str] = asyncio.Queue()

    async def fetch(self: HubModels, model: str, on_line: object) -> None:
        fetched.append(model)
        if problem := await go.get():
            raise FetchFailed(problem)
        self._folders[model] = "demo"

    monkeypatch.setattr(HubModels, "fetch", fetch)
    (managed.folder / "models.toml").write_text('[models.far]\nmodel="org/far"\n[models.b]\nmodel="demo"')
    assert await link.reload() == ""
    with link.wanting("far"):
        await managed.until_state("far", "loading")
        assert not managed.supervisor.children
        with link.wanting("b"):
            (await managed.child(1)).serve()
            await managed.until_state("b", "loaded")
        go.put_nowait("there is no such repository")
        await managed.until_state("far", "failed")
        assert link.states["far"].reason == "there is no such repository"
        await asyncio.sleep(0.05)
        assert fetched == ["org/far"], "the request that waits causes no attempt at once"
    link.order(Load("far"))
    await until(lambda: len(fetched) == 2)
    go.put_nowait("")
    await until(lambda: managed.supervisor.children[0].stopped)
    managed.supervisor.children[0].end(0)
    (await managed.child(2)).serve()
    await managed.until_state("far", "loaded")
    assert link.states["far"].nbytes > 0
