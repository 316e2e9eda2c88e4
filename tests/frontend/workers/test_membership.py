"""frontend/workers/membership.py with connections that need no sockets."""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.server.http_protocol import available_connections
from frontend.workers.connection import ConnectionCounters, WorkerConnection
from frontend.workers.membership import FILES_OF_A_WORKER, Discovery, Membership
from frontend.workers.pool import WorkerPool
from frontend.workers.status import READY, ConnectionState, not_ready
from shared import messages as m
from shared.address import Address, parse_all
from shared.config.declaration import ConfigError
from shared.config.settings import WireConfig

LIMITS = m.Limits(100, 100, (1,))


class FakeConnection(WorkerConnection):
    """A connection whose state the test sets."""

    fake_state = ConnectionState.CONNECTING
    closed = False

    def open(self, context: Any, wire: WireConfig) -> None:
        if "keyless" in self.address.name:
            raise ConfigError("there are no keys")

    def close(self) -> None:
        self.closed = True

    @property
    def state(self) -> ConnectionState:
        return self.fake_state


def connect(address: Address) -> WorkerConnection:
    return FakeConnection(address, b"frontend", object(), ConnectionCounters(), stall_timeout=1.0)  # type: ignore[arg-type]


Opens = Callable[..., Awaitable[Membership]]


@pytest.fixture
def membership() -> Iterator[Opens]:
    """Returns a function that starts a Membership for some addresses. Every Membership is closed after the test."""
    opened: list[Membership] = []

    async def start(text: str, file: Path | None = None) -> Membership:
        discovery = Discovery(parse_all(text), file)
        made = Membership(WireConfig(), discovery, connect, model="", tokenizer_hash=lambda: "hash", resolve_s=60.0)
        opened.append(made)
        await made.start()
        return made

    yield start
    for made in opened:
        made.close()


def welcome(
    model: str = "m", version: int = m.PROTOCOL_VERSION, tokenizer: str = "hash", limits: m.Limits = LIMITS
) -> m.Welcome:
    return m.Welcome(1, 1, 1, model, tokenizer, limits, version)


def states(made: Membership, *states: ConnectionState) -> None:
    for connection, state in zip(made.connections, states, strict=True):
        connection.fake_state = state  # type: ignore[attr-defined]


async def test_readiness_of_one_worker_is_its_own(membership: Opens) -> None:
    made = await membership("ipc:///a")
    assert made.readiness == not_ready("no worker yet") and made.handshaking
    states(made, ConnectionState.READY)
    assert made.readiness == READY and not made.handshaking


async def test_readiness_of_several_workers_needs_one_or_names_all(membership: Opens) -> None:
    made = await membership("ipc:///a ipc:///b")
    states(made, ConnectionState.LOST, ConnectionState.LEAVING)
    assert made.readiness == not_ready("ipc:///a: worker lost; ipc:///b: leaving") and not made.handshaking
    states(made, ConnectionState.LOST, ConnectionState.READY)
    assert made.readiness == READY and made.ready() == made.connections[1:]
    assert made.ready(excluding=made.connections[1:]) == []


async def test_readiness_without_addresses_says_so(membership: Opens, tmp_path: Path) -> None:
    made = await membership("", tmp_path / "workers")
    assert made.readiness == not_ready("no worker is known")


async def test_address_that_is_gone_makes_its_worker_leave_until_it_is_back(membership: Opens, tmp_path: Path) -> None:
    file = tmp_path / "workers"
    file.write_text("ipc:///a ipc:///b")
    made = await membership("", file)
    made._update(parse_all("ipc:///b"))
    assert [connection.leaving for connection in made.connections] == [True, False]
    made._update(parse_all("ipc:///a ipc:///b"))
    assert [connection.leaving for connection in made.connections] == [False, False]


async def test_worker_without_keys_is_an_error_unless_addresses_change(
    membership: Opens, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="no keys"):
        await membership("ipc:///keyless")
    made = await membership("ipc:///keyless ipc:///b", tmp_path / "workers")
    assert [connection.address.name for connection in made.connections] == ["ipc:///b"]
    assert "the worker at ipc:///keyless cannot be used" in caplog.text


async def test_removed_connection_is_closed(membership: Opens) -> None:
    made = await membership("ipc:///a")
    [connection] = made.connections
    made.remove(connection)
    assert made.connections == [] and connection.closed  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (welcome(version=m.PROTOCOL_VERSION + 1), "speaks protocol"),
        (welcome(model="n"), "its model is 'n', the others' 'm'"),
        (welcome(tokenizer="zzz"), "the worker has another tokenizer"),
        (welcome(limits=m.Limits(50, 100, (1,))), "its --max-seq-len is 50, the others' 100"),
    ],
)
async def test_worker_that_differs_from_the_first_is_incompatible(
    membership: Opens, other: m.Welcome, reason: str
) -> None:
    made = await membership("ipc:///a ipc:///b")
    first, second = made.connections
    first.welcome = welcome()
    made.check_compatible()
    second.welcome = other
    made.check_compatible()
    assert first.incompatible == "" and reason in second.incompatible
    assert made.welcome == first.welcome


async def test_next_kind_of_worker_decides_when_the_first_kind_is_gone(membership: Opens) -> None:
    made = await membership("ipc:///a ipc:///b")
    first, second = made.connections
    first.welcome, second.welcome = welcome(), welcome(model="n")
    made.check_compatible()
    first.welcome = None
    made.check_compatible()
    assert second.incompatible == "" and made.welcome == second.welcome


MANY = 520  # libzmq's default number of sockets is enough for 511 workers


async def test_more_workers_join_than_libzmq_has_sockets_for_by_default(tmp_path: Path) -> None:
    addresses = parse_all(" ".join(f"ipc://{tmp_path}/{n}" for n in range(MANY)))
    assert available_connections(MANY * 2 * FILES_OF_A_WORKER) == MANY * 2 * FILES_OF_A_WORKER
    pool = WorkerPool(WireConfig(run_dir=str(tmp_path)), Discovery(addresses))
    await pool.start()
    try:
        assert len(pool.membership.connections) == MANY
    finally:
        await pool.close()


async def test_workers_have_half_of_the_open_files(
    membership: Opens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    allowed = [3 * 2 * FILES_OF_A_WORKER + 1]
    monkeypatch.setattr("resource.getrlimit", lambda kind: (allowed[0], allowed[0]))
    assert len((await membership(" ".join(f"ipc:///tmp/{n}" for n in range(3)))).connections) == 3
    with pytest.raises(ConfigError, match=r"4 workers are configured.*ulimit -n.*enough for 3"):
        await membership(" ".join(f"ipc:///tmp/{n}" for n in range(4)))
    file = tmp_path / "workers"
    file.write_text("\n".join(f"ipc:///tmp/{n}" for n in range(5)))
    made = await membership("", file)
    made._update(await made._addresses())
    assert len(made.connections) == 3 and caplog.text.count("5 workers are configured") == 1
    allowed[0] = -1
    made._update(await made._addresses())
    assert len(made.connections) == 5, "no limit"
