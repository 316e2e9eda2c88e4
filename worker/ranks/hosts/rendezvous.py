"""How the ranks of several hosts come together: rank 0 gathers all others, and each connects to each.

    another rank → rank 0     Introduction: what it has; over the connection that rank 0 then gives its orders on
    rank 0 → another rank     Welcome, when all have come and have the same as rank 0; or Refusal
    a rank → each before it   a connection for rows, under the group's name, which rank 0 has drawn

A rank that has lost rank 0 begins anew, and so does a rank 0 that has lost another one: no group is ever repaired.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from shared.config import WorkerConfig
from worker.kernels.cpu.ranks_c import RankLost
from worker.ranks.frames import receive, send
from worker.ranks.hosts.door import Door, Guest
from worker.ranks.hosts.group import Group
from worker.ranks.hosts.handshake import NO_GROUP, ORDERS, ROWS, Caller, WrongKey
from worker.ranks.hosts.links import connect, wait_for_end

log = logging.getLogger("sluice.ranks")

POLL_S = 0.2
AGAIN_S = 0.5  # after which a rank tries again to reach rank 0
TOLD_EVERY_S = 30.0
ROWS_S = 30.0  # for all connections for rows, once all ranks have come
MOST_BYTES = 1 << 20  # of a frame of the rendezvous

Facts = Mapping[str, str]
Frame = TypeVar("Frame")


class Refused(Exception):
    """This rank does not fit rank 0, or their keys differ. A later try may succeed: one host may not be updated yet."""


class Introduction(msgspec.Struct, frozen=True):
    """What another rank says of itself. facts: what must be the same for all ranks, by the words for it."""

    pid: int
    facts: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """group: the name of this group of processes. addresses: of the ranks from 1 on. worker: rank 0's settings."""

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
    """What another rank has when all have come together. worker: rank 0's settings. rows: connections by rank."""

    orders: socket.socket
    worker: WorkerConfig
    rows: dict[int, socket.socket]


@dataclass(frozen=True, slots=True)
class Gathered:
    """What rank 0 has then. members: in the order of their ranks."""

    members: list[Member]
    rows: dict[int, socket.socket]


@dataclass(slots=True)
class Hosts:
    """One rank's side of the rendezvous. secret: the worker's key, empty with --insecure."""

    group: Group
    secret: bytes = field(repr=False)

    def gather(self, facts: Facts, worker: WorkerConfig, on_progress: Callable[[], None]) -> Gathered:
        """Waits for all other ranks, however long it takes. Called by rank 0.

        Raises ConfigError if it cannot listen, and RankLost if a rank is lost after all have come.
        """
        group = self.group
        with Door(group.port, self.secret) as door:
            members = _gather_members(door, group, facts, on_progress)
            name = os.urandom(16)

            def check() -> None:
                on_progress()
                for member in members.values():
                    _check_is_there(f"rank {member.rank}", member.orders)

            welcome = Welcome(name, [members[rank].address for rank in range(1, group.count)], worker)
            try:
                for member in members.values():
                    send(member.orders, welcome)
                rows = _accept_rows(door, name, range(1, group.count), check)
            except OSError as error:
                raise RankLost(str(error)) from error
        return Gathered([members[rank] for rank in range(1, group.count)], rows)

    def join(self, facts: Facts) -> Joined:
        """Comes together with rank 0 and all others, however long it takes. Called by another rank.

        Raises Refused, and ConfigError if it cannot listen.
        """
        group, told = self.group, 0.0
        with Door(group.port + group.rank, self.secret) as door:
            while True:
                try:
                    return self._join(door, facts)
                except (OSError, EOFError, msgspec.MsgspecError) as error:
                    if time.monotonic() - told > TOLD_EVERY_S or not told:
                        told = time.monotonic()
                        why = str(error) or "it has closed the connection"
                        log.info("waiting for rank 0 at %s:%d: %s", group.leader, group.port, why)
                    time.sleep(AGAIN_S)

    def _join(self, door: Door, facts: Facts) -> Joined:
        group, links = self.group, list[socket.socket]()

        def link(purpose: int, host: str, port: int, name: bytes = NO_GROUP) -> socket.socket:
            try:
                links.append(connect(host, port, self.secret, Caller(purpose, group.rank, name)))
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
            rows |= _accept_rows(door, welcome.group, behind, lambda: _check_is_there("rank 0", orders))
        except BaseException:
            for each in links:
                each.close()
            raise
        return Joined(orders, welcome.worker, rows)


def difference(own: Facts, other: Facts) -> str:
    """Returns the words for the first fact that differs, with both values; empty if all are the same."""
    for name in (*own, *other):
        if own.get(name) != other.get(name):
            return f"{name} {other.get(name, 'none')}, and rank 0 has {own.get(name, 'none')}"
    return ""


def _gather_members(door: Door, group: Group, facts: Facts, on_progress: Callable[[], None]) -> dict[int, Member]:
    members: dict[int, Member] = {}
    told = 0.0
    while missing := [rank for rank in range(1, group.count) if rank not in members]:
        if time.monotonic() - told > TOLD_EVERY_S or not told:
            told = time.monotonic()
            log.info("waiting on port %d for rank %s", group.port, ", ".join(map(str, missing)))
        on_progress()
        if (guest := door.next(POLL_S)) is not None and (member := _introduced(guest, group, facts)) is not None:
            if (before := members.get(member.rank)) is not None:
                before.orders.close()
            members[member.rank] = member
            log.info("rank %d has come from %s", member.rank, member.address)
        for rank in [rank for rank, one in members.items() if wait_for_end(one.orders, 0)]:
            members.pop(rank).orders.close()
    return members


def _introduced(guest: Guest, group: Group, facts: Facts) -> Member | None:
    """Returns the rank that has come; None if it is refused, or has gone."""
    rank, link = guest.caller.rank, guest.link
    try:
        if guest.caller.purpose != ORDERS:
            raise EOFError("it belongs to a group that has ended")
        link.settimeout(POLL_S * 10)
        introduction = msgspec.msgpack.decode(receive(link, MOST_BYTES), type=Introduction)
        link.settimeout(None)
        reason = difference(facts, introduction.facts)
        if 0 < rank < group.count and not reason:
            return Member(rank, introduction.pid, link, guest.address)
        reason = f"rank {rank} has {reason}" if reason else f"there is no rank {rank} among {group.count}"
        log.warning("refused a rank at %s: %s", guest.address, reason)
        send(link, Refusal(reason))
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        log.warning("lost a rank at %s before it had introduced itself: %s", guest.address, error or "it has gone")
    link.close()
    return None


def _welcome(orders: socket.socket) -> Welcome:
    answer: Welcome | Refusal = msgspec.msgpack.decode(receive(orders, MOST_BYTES), type=Welcome | Refusal)
    if isinstance(answer, Refusal):
        raise Refused(answer.reason)
    return answer


def _accept_rows(door: Door, name: bytes, ranks: range, on_progress: Callable[[], None]) -> dict[int, socket.socket]:
    """Waits for the connections for rows of other ranks of this group. Raises ConnectionError if one does not come."""
    rows: dict[int, socket.socket] = {}
    deadline = time.monotonic() + ROWS_S
    while len(rows) < len(ranks):
        on_progress()
        if time.monotonic() > deadline:
            raise ConnectionError(f"no connection from rank {', '.join(str(one) for one in ranks if one not in rows)}")
        if (guest := door.next(POLL_S)) is None:
            continue
        caller = guest.caller
        if caller.purpose == ROWS and caller.group == name and caller.rank in ranks and caller.rank not in rows:
            rows[caller.rank] = guest.link
        else:
            guest.link.close()  # of a group that is no more, or of a rank that begins anew
    return rows


def _check_is_there(name: str, orders: socket.socket) -> None:
    if ended := wait_for_end(orders, 0):
        raise ConnectionError(f"{name} is gone: {ended}")
