"""The workers of the pool: one connection for each configured address, and whether the workers are compatible.

Knows addresses, connections and what workers report; nothing of streams, except that a worker whose address is gone
stays until its last stream has ended.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from frontend.workers.connection import WorkerConnection
from frontend.workers.routing import load
from frontend.workers.status import READY, STARTING, ConnectionState, Readiness, WorkerStatus, not_ready
from shared import messages as m
from shared.address import Address, parse_all
from shared.config.declaration import ConfigError
from shared.config.settings import WireConfig
from shared.wire import MAX_SOCKETS, large_context

# Worker addresses from the flags, from the lines of a file, and from DNS.
#
# Knows no sockets. If the file cannot be read, or DNS fails, the addresses last found stay, and the log says so once.

log = logging.getLogger("sluice.pool")


def look_up(host: str) -> list[str]:
    """Returns the IPv4 addresses of a host, in a stable order; raises OSError."""
    entries = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in entries})


class Discovery:
    """Finds the workers' addresses. If `changing`, `resolve` reads a file or asks DNS: call it off the event loop."""

    def __init__(
        self, fixed: list[Address], file: Path | None = None, look_up: Callable[[str], list[str]] = look_up
    ) -> None:
        self.changing = file is not None or any(address.host for address in fixed)
        self._fixed = fixed
        self._file = file
        self._look_up = look_up
        self._stamp = (0, 0)  # modification time and size of the file when it was read
        self._from_file: list[Address] = []
        self._ips: dict[str, list[str]] = {}  # host name → its IP addresses
        self._problem = ""

    def resolve(self) -> list[Address]:
        """Returns the addresses of all workers, without duplicates: first from the flags, then from the file."""
        problems: list[str] = []
        configured = [*self._fixed, *self._read_file(problems)]
        resolved = list(dict.fromkeys(each for address in configured for each in self._expand(address, problems)))
        self._report("; ".join(problems))
        return resolved

    def _read_file(self, problems: list[str]) -> list[Address]:
        if self._file is None:
            return []
        try:
            stat = self._file.stat()
            if (stat.st_mtime_ns, stat.st_size) != self._stamp:
                lines = (line.partition("#")[0] for line in self._file.read_text(encoding="utf-8").splitlines())
                self._from_file = [address for line in lines for address in parse_all(line)]
                self._stamp = stat.st_mtime_ns, stat.st_size
        except OSError as error:
            problems.append(f"--workers-file {self._file}: {error.strerror or error}")
        except ValueError as error:
            problems.append(f"--workers-file {self._file}: {error}")
        return self._from_file

    def _expand(self, address: Address, problems: list[str]) -> Iterator[Address]:
        """Yields the address itself or, if it has a host name, an address for each IP address of the host."""
        if not (host := address.host):
            yield address
            return
        try:
            self._ips[host] = self._look_up(host)
        except OSError as error:
            problems.append(f"cannot look up {host}: {error}")
        yield from (address.at(ip) for ip in self._ips.get(host, []))

    def _report(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem


FILES_OF_A_WORKER = 4  # two sockets, each with its connection and a descriptor that wakes its reader
RESOLVE_S = 3.0  # pause between two look-ups of the workers' addresses in the file and in DNS


def most_workers() -> int:
    """Returns how many workers a frontend may connect to with half of the open files that the system allows."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    sockets = MAX_SOCKETS // 2
    return sockets if files == resource.RLIM_INFINITY else min(sockets, files // 2 // FILES_OF_A_WORKER)


class Membership:
    """Holds the connections to the workers, in the order of joining.

    A worker is used only if it serves the same model, with the same limits, as the first worker (`welcome`).
    """

    def __init__(
        self,
        wire: WireConfig,
        discovery: Discovery | None,
        connect: Callable[[Address], WorkerConnection],
        *,
        model: str,
        tokenizer_hash: Callable[[], str],
        resolve_s: float,
    ) -> None:
        self.connections: list[WorkerConnection] = []
        self.welcome: m.Welcome | None = None  # what every worker must match; None until the first handshake
        self.has_roles = False  # whether a worker has reported that it is a prefill worker
        self._wire = wire
        self._discovery = discovery or Discovery([Address(wire.requests, wire.requests, wire.events)])
        self._connect = connect
        self._model = model
        self._tokenizer_hash = tokenizer_hash
        self._resolve_s = resolve_s
        self._context = large_context()
        self._watcher: asyncio.Task[None] | None = None
        self._problem = ""  # the latest warning, which is not repeated

    async def start(self) -> None:
        self._update(await self._addresses())
        if self._discovery.changing:
            self._watcher = asyncio.create_task(self._watch())

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        for connection in self.connections:
            connection.close()
        self._context.destroy(linger=0)

    # readiness

    def ready(self, excluding: Collection[WorkerConnection] = (), fingerprint: str = "") -> list[WorkerConnection]:
        """Returns the workers with this fingerprint ("": any) that can serve new requests now."""
        return [
            connection
            for connection in self.connections
            if connection.state is ConnectionState.READY
            and connection not in excluding
            and (not fingerprint or connection.fingerprint == fingerprint)
        ]

    def generating(self, excluding: Collection[WorkerConnection] = (), fingerprint: str = "") -> list[WorkerConnection]:
        """Returns the workers of ready() without prefill workers, which only stand in while there is no other one."""
        found = self.ready(() if self.has_roles else excluding, fingerprint)
        if not self.has_roles:
            return found
        found = [one for one in found if one.role is not m.Role.PREFILL] or found
        return [one for one in found if one not in excluding]

    def may_return(self, fingerprint: str) -> bool:
        """Whether the pool has a worker whose latest fingerprint is this one, even if the worker is lost now."""
        return not fingerprint or any(connection.fingerprint == fingerprint for connection in self.connections)

    @property
    def fingerprint(self) -> str:
        """The common fingerprint of all ready workers; empty if their fingerprints differ or no worker is ready."""
        found = {connection.fingerprint for connection in self.ready()}
        return found.pop() if len(found) == 1 else ""

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprint of each ready worker."""
        return [connection.fingerprint for connection in self.ready()]

    @property
    def readiness(self) -> Readiness:
        """Whether a worker can serve new requests now and, if not, why."""
        each = [connection.readiness for connection in self.connections]
        if any(readiness.ready for readiness in each):
            return READY
        if len(each) < 2:
            return each[0] if each else not_ready("no worker is known")
        texts = [f"{connection.address.name}: {connection.readiness.text}" for connection in self.connections]
        return not_ready("; ".join(texts))

    @property
    def handshaking(self) -> bool:
        """Whether no worker is ready, but a worker may become ready at any moment."""
        return not self.ready() and any(connection.state in STARTING for connection in self.connections)

    def statuses(self) -> list[WorkerStatus]:
        return [_status(connection) for connection in self.connections]

    # members

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._resolve_s)
            self._update(await self._addresses())

    async def _addresses(self) -> list[Address]:
        """Resolves the addresses, in a thread if that could block the event loop."""
        return (
            await asyncio.to_thread(self._discovery.resolve) if self._discovery.changing else self._discovery.resolve()
        )

    def _update(self, addresses: list[Address]) -> None:
        """Connects to new addresses; a worker whose address is gone leaves when its streams have ended."""
        known = {connection.address: connection for connection in self.connections}
        for address in addresses:
            if address in known:
                known[address].leaving = False
        new = [address for address in addresses if address not in known]
        for address in self._not_full(new):
            self._join(address)
        for address in known.keys() - set(addresses):
            if not known[address].leaving:
                log.info("worker %s leaves the pool when its streams have ended", address.name)
            known[address].leaving = True

    def _not_full(self, new: list[Address]) -> list[Address]:
        """Returns the new addresses, cut to the number that may join. Raises ConfigError if the flags name too many."""
        most = most_workers()
        room = max(0, most - len(self.connections))
        if len(new) > room:
            total = len(self.connections) + len(new)
            text = f"{total} workers are configured, but the open files (ulimit -n) are enough for {most} of them"
            if not self._discovery.changing:
                raise ConfigError(text)
            if text != self._problem:
                log.warning("%s; the others are not used", text)
            self._problem = text
        return new[:room]

    def _join(self, address: Address) -> None:
        connection = self._connect(address)
        try:
            connection.open(self._context, self._wire)
        except ConfigError as error:  # no keys are configured for the worker
            if not self._discovery.changing:
                raise
            log.warning("the worker at %s cannot be used: %s", address.name, error)
            return
        self.connections.append(connection)
        if self._discovery.changing:
            log.info("worker %s joins the pool", address.name)

    def remove(self, connection: WorkerConnection) -> None:
        self.connections.remove(connection)
        connection.close()

    # compatibility

    def check_compatible(self) -> None:
        """Records why workers are incompatible: this frontend cannot use them, or they do not match `welcome`.

        If no usable worker matches `welcome`, `welcome` is first replaced by the Welcome of the first usable worker.
        """
        usable = [
            connection.welcome
            for connection in self.connections
            if connection.welcome and not self._unusable(connection.welcome)
        ]
        if usable and all(_difference(welcome, self.welcome) for welcome in usable):
            self.welcome = usable[0]
        for connection in self.connections:
            if connection.welcome is not None:
                problem = self._unusable(connection.welcome) or _difference(connection.welcome, self.welcome)
                if problem and problem != connection.incompatible:
                    log.warning("the worker at %s is not used: %s", connection.address.name, problem)
                connection.incompatible = problem

    def _unusable(self, welcome: m.Welcome) -> str:
        """Returns why this frontend cannot use the worker; empty if it can."""
        own_hash = self._tokenizer_hash()
        if welcome.version != m.PROTOCOL_VERSION:
            return f"the worker speaks protocol {welcome.version}, this frontend {m.PROTOCOL_VERSION}"
        if self._model and welcome.model != self._model:
            return f"the worker serves {welcome.model!r}, this frontend {self._model!r}; see --served-model-name"
        if own_hash and welcome.tokenizer_hash and welcome.tokenizer_hash != own_hash:
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
        connection.fingerprint,
    )


def _difference(welcome: m.Welcome, others: m.Welcome | None) -> str:
    """Returns how a worker differs from the others; empty if it does not."""
    if others is None:
        return "it is the first one"
    pairs = (
        ("model", welcome.model, others.model),
        ("tokenizer", welcome.tokenizer_hash[:12], others.tokenizer_hash[:12]),
        ("vocabulary", welcome.limits.vocab_size, others.limits.vocab_size),
        ("--max-seq-len", welcome.limits.max_seq_len, others.limits.max_seq_len),
        ("end tokens", welcome.limits.eos_token_ids, others.limits.eos_token_ids),
    )
    return "; ".join(f"its {name} is {this!r}, the others' {that!r}" for name, this, that in pairs if this != that)
