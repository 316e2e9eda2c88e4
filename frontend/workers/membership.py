"""Which workers there are: one connection for each address that is configured now; and whether they fit together.

Knows addresses, links and what workers say of themselves; nothing of streams, except that a worker whose address is
gone stays until its last one has ended.
"""

import asyncio
import logging
from collections.abc import Callable, Collection

import zmq

from frontend.workers.connection import WorkerConnection
from frontend.workers.discovery import Discovery
from frontend.workers.routing import load
from frontend.workers.status import READY, STARTING, ConnectionState, Readiness, WorkerStatus, not_ready
from shared import messages as m
from shared.address import Address
from shared.config import ConfigError, WireConfig

log = logging.getLogger("sluice.fleet")

LOOK_S = 3.0  # how often files and host names are read again


class Membership:
    """`connections` are the workers of now, in the order of joining."""

    def __init__(
        self,
        wire: WireConfig,
        places: Discovery | None,
        make: Callable[[Address], WorkerConnection],
        *,
        model: str,
        tokenizer_hash: Callable[[], str],
        look_s: float,
    ) -> None:
        self.connections: list[WorkerConnection] = []
        self.welcome: m.Welcome | None = None  # what all of them must agree with
        self._wire = wire
        self._places = places or Discovery([Address(wire.requests, wire.requests, wire.events)])
        self._make = make
        self._model = model
        self._tokenizer_hash = tokenizer_hash
        self._look_s = look_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._update(await self._addresses())
        if self._places.changing:
            self._watching = asyncio.create_task(self._watch())

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for connection in self.connections:
            connection.close()
        self._context.destroy(linger=0)

    # how they are

    def ready(self, but: Collection[WorkerConnection] = ()) -> list[WorkerConnection]:
        """Those that can serve new requests now."""
        return [
            connection
            for connection in self.connections
            if connection.state is ConnectionState.READY and connection not in but
        ]

    @property
    def readiness(self) -> Readiness:
        """Whether one of them can and, if not, why."""
        each = [connection.readiness for connection in self.connections]
        if any(one.ready for one in each):
            return READY
        if len(each) < 2:
            return each[0] if each else not_ready("no worker is known")
        texts = [f"{connection.address.name}: {connection.readiness.text}" for connection in self.connections]
        return not_ready("; ".join(texts))

    @property
    def handshaking(self) -> bool:
        """Whether none of them can, but one may be able to at any moment."""
        return not self.ready() and any(connection.state in STARTING for connection in self.connections)

    def statuses(self) -> list[WorkerStatus]:
        return [_status(connection) for connection in self.connections]

    # who belongs

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            self._update(await self._addresses())

    async def _addresses(self) -> list[Address]:
        """Off the loop where it could block."""
        return await asyncio.to_thread(self._places.look) if self._places.changing else self._places.look()

    def _update(self, addresses: list[Address]) -> None:
        """Joins new workers; one whose address is gone is to leave."""
        known = {connection.address: connection for connection in self.connections}
        for address in addresses:
            if address in known:
                known[address].leaving = False
            else:
                self._join(address)
        for address in known.keys() - set(addresses):
            if not known[address].leaving:
                log.info("worker %s leaves when its streams have ended", address.name)
            known[address].leaving = True

    def _join(self, address: Address) -> None:
        connection = self._make(address)
        try:
            connection.open(self._context, self._wire)
        except ConfigError as error:  # no keys for it
            if not self._places.changing:
                raise
            log.warning("the worker at %s cannot be used: %s", address.name, error)
            return
        self.connections.append(connection)
        if self._places.changing:
            log.info("worker %s joins", address.name)

    def remove(self, connection: WorkerConnection) -> None:
        self.connections.remove(connection)
        connection.close()

    # whether they fit

    def check_fit(self) -> None:
        """All must serve the same. The first worker decides what; when none of its kind is left, the next."""
        fit = [
            connection.welcome
            for connection in self.connections
            if connection.welcome and not self._misfit(connection.welcome)
        ]
        if fit and all(_differs(welcome, self.welcome) for welcome in fit):
            self.welcome = fit[0]
        for connection in self.connections:
            if connection.welcome is not None:
                problem = self._misfit(connection.welcome) or _differs(connection.welcome, self.welcome)
                if problem and problem != connection.incompatible:
                    log.warning("the worker at %s is not used: %s", connection.address.name, problem)
                connection.incompatible = problem

    def _misfit(self, welcome: m.Welcome) -> str:
        """Why a frontend like this one cannot use a worker; empty: it can."""
        ours = self._tokenizer_hash()
        if welcome.version != m.PROTOCOL_VERSION:
            return f"the worker speaks protocol {welcome.version}, this frontend {m.PROTOCOL_VERSION}"
        if self._model and welcome.model != self._model:
            return f"the worker serves {welcome.model!r}, this frontend {self._model!r}; see --served-model-name"
        if ours and welcome.tokenizer_hash and welcome.tokenizer_hash != ours:
            return "the worker has another tokenizer"
        return ""


def _status(connection: WorkerConnection) -> WorkerStatus:
    streams = connection.streams.values()
    return WorkerStatus(
        connection.address.name,
        connection.state,
        connection.readiness.text,
        connection.status,
        len(streams),
        load(streams, None),
        connection.welcome is not None,
    )


def _differs(welcome: m.Welcome, others: m.Welcome | None) -> str:
    """In what a worker does not fit to the others; empty: in nothing."""
    if others is None:
        return "it is the first"
    pairs = (
        ("model", welcome.model, others.model),
        ("tokenizer", welcome.tokenizer_hash[:12], others.tokenizer_hash[:12]),
        ("vocabulary", welcome.limits.vocab_size, others.limits.vocab_size),
        ("--max-seq-len", welcome.limits.max_seq_len, others.limits.max_seq_len),
        ("end tokens", welcome.limits.eos_token_ids, others.limits.eos_token_ids),
    )
    return "; ".join(f"its {name} is {this!r}, the others' {that!r}" for name, this, that in pairs if this != that)
