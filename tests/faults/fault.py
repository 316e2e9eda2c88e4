"""Describes a fault: how the server is started, what is broken, and how to see that the server has recovered."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.faults.server import ServerPlan, ServerUnderTest, Stats

Recovered = Callable[[Stats], bool]
Inject = Callable[[ServerUnderTest, random.Random], Awaitable[Recovered]]


def at_once(stats: Stats) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Fault:
    """`inject` starts while streams are in flight and returns when the fault is over.

    It raises AssertionError if it sees something wrong itself.
    """

    about: str
    inject: Inject
    plan: ServerPlan = field(default_factory=ServerPlan)
    may_cut: bool = False  # connections may break, because their frontend is killed
    stops_server: bool = False  # the server is gone afterwards
    before_streams: bool = False  # starts before the streams, so that it also hits their first messages
