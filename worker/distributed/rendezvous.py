"""The rendezvous of ranks on several hosts: rank 0 waits for all others, and then all ranks connect to each other.

    another rank → rank 0         Introduction, over the connection on which rank 0 later sends orders
    rank 0 → another rank         Welcome, when all ranks have come and their facts are equal; or else Refusal
    a rank → each rank before it  a connection for rows, with the random name that rank 0 gave to the group

If rank 0 loses another rank, or another rank loses rank 0, it starts the rendezvous again. A group is never repaired.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from shared.config.declaration import ConfigError
from shared.config.worker import WorkerConfig
from worker.distributed.handshake import (
    NO_GROUP,
    ORDERS,
    ROWS,
    Identity,
    Listener,
    Peer,
    WrongKey,
    connect,
    wait_for_end,
)
from worker.distributed.messages import receive, send
from worker.ops.exchange import RankLost

# Reads the rank of this process from the environment variables that torchrun or LeaderWorkerSet sets.

PORT = 5557  # the port of rank 0, if no flag or variable names one; rank N listens on this port + N
LAST_PORT = 65535
MOST = 128  # ranks


@dataclass(frozen=True, slots=True)
class Group:
    """The group of all ranks of a worker. leader, port: the address of rank 0; rank N listens on port + N.

    here: how many ranks are on this machine; place: the index of this rank among them.
    """

    rank: int
    count: int
    leader: str
    port: int
    here: int = 1
    place: int = 0

    @property
    def machines(self) -> int:
        """The number of machines, assuming that all have as many ranks as this one."""
        return self.count // self.here


@dataclass(frozen=True, slots=True)
class Variables:
    """The names of the environment variables that hold the fields of Group."""

    rank: str
    count: str
    leader: str
    port: str = ""
    here: str = ""
    place: str = ""


STARTERS = {
    "torchrun": Variables("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    "lws": Variables("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"),
}
OWN_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # if "True", torchrun itself listens on MASTER_PORT


def read_group(worker: WorkerConfig, environment: Mapping[str, str]) -> Group:
    """Returns the group that the environment describes. --rank-group must not be `local`. Raises ConfigError."""
    names = STARTERS[worker.rank_group]
    read = _Reader(environment, f"--rank-group {worker.rank_group}")
    count = read.number(names.count, 2, MOST)
    if count != worker.ranks:
        both = f" times --pipeline-parallel-size {worker.pipeline_parallel_size}" * (worker.pipeline_parallel_size > 1)
        raise ConfigError(
            f"--tensor-parallel-size {worker.tensor_parallel_size}{both} is not the {count} of {names.count}"
        )
    rank = read.number(names.rank, 0, count - 1)
    here = read.number(names.here, 1, count) if environment.get(names.here) else 1
    place = read.number(names.place, 0, here - 1) if here > 1 else 0
    return Group(rank, count, read.text(names.leader), _port(worker, names, read, count), here, place)


def _port(worker: WorkerConfig, names: Variables, read: "_Reader", count: int) -> int:
    port = worker.rank_port
    if not port and read.environment.get(OWN_STORE) == "True":
        raise ConfigError("--rank-port is needed, because torchrun itself listens on MASTER_PORT")
    if not port:
        port = read.number(names.port, 1, LAST_PORT) if names.port else PORT
    if port + count - 1 > LAST_PORT:
        raise ConfigError(f"--rank-port {port} leaves no {count} ports up to {LAST_PORT}, of which each rank has one")
    return port


@dataclass(frozen=True, slots=True)
class _Reader:
    environment: Mapping[str, str]
    flag: str

    def text(self, name: str) -> str:
        if not (value := self.environment.get(name, "").strip()):
            raise ConfigError(f"{self.flag} reads the variable {name}, which is not set")
        return value

    def number(self, name: str, least: int, most: int) -> int:
        value = self.text(name)
        if not (value.isascii() and value.isdecimal() and least <= int(value) <= most):
            raise ConfigError(f"{name} must be a number from {least} to {most}, not {value!r} ({self.flag} reads it)")
        return int(value)


log = logging.getLogger("sluice.ranks")
POLL_S = 0.2
AGAIN_S = 0.5  # seconds after which a rank tries again to reach rank 0
TOLD_EVERY_S = 30.0  # seconds between two log lines about waiting
ROWS_S = 30.0  # the timeout for all connections for rows, once all ranks have come
MOST_BYTES = 1 << 20  # the maximum bytes of a frame of the rendezvous
Facts = Mapping[str, str]
Frame = TypeVar("Frame")


class Refused(Exception):
    """Rank 0 refused this rank, or their keys differ. A later try may succeed, for example after one host's update."""


class Introduction(msgspec.Struct, frozen=True):
    """Another rank's message to rank 0. facts: values that must be equal for all ranks, by their names in errors."""

    pid: int
    facts: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's answer when all ranks have come. group: the random name of the group. addresses: of ranks 1, 2, ...

    worker: rank 0's settings.
    """

    group: bytes
    addresses: list[str]
    worker: WorkerConfig


class Refusal(msgspec.Struct, frozen=True, tag=True):
    reason: str


@dataclass(frozen=True, slots=True)
class Member:
    """Another rank, seen from rank 0."""

    rank: int
    pid: int
    orders: socket.socket
    address: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of the rendezvous for another rank.

    orders: the connection to rank 0. worker: rank 0's settings. rows: the connections for rows, by rank.
    """

    orders: socket.socket
    worker: WorkerConfig
    rows: dict[int, socket.socket]


@dataclass(frozen=True, slots=True)
class Gathered:
    """The result of the rendezvous for rank 0. members: the other ranks, in order. rows: see Joined."""

    members: list[Member]
    rows: dict[int, socket.socket]


@dataclass(slots=True)
class Hosts:
    """One rank's side of the rendezvous. secret: the worker's key; empty with --insecure."""

    group: Group
    secret: bytes = field(repr=False)

    def gather(self, facts: Facts, worker: WorkerConfig, on_progress: Callable[[], None]) -> Gathered:
        """Waits without a timeout for all other ranks. Called by rank 0.

        Raises ConfigError if it cannot listen, and RankLost if a rank is lost after all have come.
        """
        group = self.group
        with Listener(group.port, self.secret) as listener:
            members = _gather_members(listener, group, facts, on_progress)
            name = os.urandom(16)

            def check() -> None:
                on_progress()
                for member in members.values():
                    _check_is_there(f"rank {member.rank}", member.orders)

            welcome = Welcome(name, [members[rank].address for rank in range(1, group.count)], worker)
            try:
                for member in members.values():
                    send(member.orders, welcome)
                rows = _accept_rows(listener, name, range(1, group.count), check)
            except OSError as error:
                raise RankLost(str(error)) from error
        return Gathered([members[rank] for rank in range(1, group.count)], rows)

    def join(self, facts: Facts) -> Joined:
        """Waits without a timeout for rank 0 and all other ranks. Called by ranks other than 0.

        Raises Refused, and ConfigError if it cannot listen.
        """
        group, told = self.group, 0.0
        with Listener(group.port + group.rank, self.secret) as listener:
            while True:
                try:
                    return self._join(listener, facts)
                except (OSError, EOFError, msgspec.MsgspecError) as error:
                    if time.monotonic() - told > TOLD_EVERY_S or not told:
                        told = time.monotonic()
                        why = str(error) or "it has closed the connection"
                        log.info("waiting for rank 0 at %s:%d: %s", group.leader, group.port, why)
                    time.sleep(AGAIN_S)

    def _join(self, listener: Listener, facts: Facts) -> Joined:
        group, links = self.group, list[socket.socket]()

        def link(purpose: int, host: str, port: int, name: bytes = NO_GROUP) -> socket.socket:
            try:
                links.append(connect(host, port, self.secret, Identity(purpose, group.rank, name)))
            except WrongKey:
                raise Refused(f"the rank at {host}:{port} does not have the worker's key of --curve-dir") from None
            return links[-1]

        try:
            orders = link(ORDERS, group.leader, group.port)
            log.info("rank %d has found rank 0 at %s:%d", group.rank, group.leader, group.port)
            send(orders, Introduction(os.getpid(), dict(facts)))
            welcome = _welcome(orders)
            hosts = [group.leader, *welcome.addresses]
            rows = {rank: link(ROWS, hosts[rank], group.port + rank, welcome.group) for rank in range(group.rank)}
            behind = range(group.rank + 1, group.count)
            rows |= _accept_rows(listener, welcome.group, behind, lambda: _check_is_there("rank 0", orders))
        except BaseException:
            for each in links:
                each.close()
            raise
        return Joined(orders, welcome.worker, rows)


def difference(own: Facts, other: Facts) -> str:
    """Returns an error text with the first fact that differs and both values; empty if all facts are equal."""
    for name in (*own, *other):
        if own.get(name) != other.get(name):
            return f"{name} {other.get(name, 'none')}, and rank 0 has {own.get(name, 'none')}"
    return ""


def _gather_members(
    listener: Listener, group: Group, facts: Facts, on_progress: Callable[[], None]
) -> dict[int, Member]:
    members: dict[int, Member] = {}
    told = 0.0
    while missing := [rank for rank in range(1, group.count) if rank not in members]:
        if time.monotonic() - told > TOLD_EVERY_S or not told:
            told = time.monotonic()
            log.info("waiting on port %d for rank %s", group.port, ", ".join(map(str, missing)))
        on_progress()
        if (peer := listener.next(POLL_S)) is not None and (member := _introduced(peer, group, facts)) is not None:
            if (before := members.get(member.rank)) is not None:
                before.orders.close()
            members[member.rank] = member
            log.info("rank %d has come from %s", member.rank, member.address)
        for rank in [rank for rank, one in members.items() if wait_for_end(one.orders, 0)]:
            members.pop(rank).orders.close()
    return members


def _introduced(peer: Peer, group: Group, facts: Facts) -> Member | None:
    """Returns the rank that has introduced itself; None if it was refused, or has disconnected."""
    rank, link = peer.identity.rank, peer.link
    try:
        if peer.identity.purpose != ORDERS:
            raise EOFError("it belongs to a group that has ended")
        link.settimeout(POLL_S * 10)
        introduction = msgspec.msgpack.decode(receive(link, MOST_BYTES), type=Introduction)
        link.settimeout(None)
        reason = difference(facts, introduction.facts)
        if 0 < rank < group.count and not reason:
            return Member(rank, introduction.pid, link, peer.address)
        reason = f"rank {rank} has {reason}" if reason else f"there is no rank {rank} among {group.count}"
        log.warning("refused a rank at %s: %s", peer.address, reason)
        send(link, Refusal(reason))
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        log.warning("lost a rank at %s before it had introduced itself: %s", peer.address, error or "it has gone")
    link.close()
    return None


def _welcome(orders: socket.socket) -> Welcome:
    answer: Welcome | Refusal = msgspec.msgpack.decode(receive(orders, MOST_BYTES), type=Welcome | Refusal)
    if isinstance(answer, Refusal):
        raise Refused(answer.reason)
    return answer


def _accept_rows(
    listener: Listener, name: bytes, ranks: range, on_progress: Callable[[], None]
) -> dict[int, socket.socket]:
    """Waits for a connection for rows from each of `ranks`. Raises ConnectionError if one is missing after ROWS_S."""
    rows: dict[int, socket.socket] = {}
    deadline = time.monotonic() + ROWS_S
    while len(rows) < len(ranks):
        on_progress()
        if time.monotonic() > deadline:
            raise ConnectionError(f"no connection from rank {', '.join(str(one) for one in ranks if one not in rows)}")
        if (peer := listener.next(POLL_S)) is None:
            continue
        identity = peer.identity
        if identity.purpose == ROWS and identity.group == name and identity.rank in ranks and identity.rank not in rows:
            rows[identity.rank] = peer.link
        else:
            peer.link.close()  # from a rank of an earlier group, or from a rank that starts again
    return rows


def _check_is_there(name: str, orders: socket.socket) -> None:
    if ended := wait_for_end(orders, 0):
        raise ConnectionError(f"{name} is gone: {ended}")
