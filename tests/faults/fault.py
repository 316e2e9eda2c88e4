"""What a fault is: how the server is started, what is broken, and how one sees that it is whole again."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.faults.site import Plan, Site, Stats

Healed = Callable[[Stats], bool]
Strike = Callable[[Site, random.Random], Awaitable[Healed]]


def at_once(stats: Stats) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Fault:
    """`strike` begins when streams are in flight and returns when the harm is done; it may say what it saw wrong
    by an AssertionError."""

    about: str
    strike: Strike
    plan: Plan = field(default_factory=Plan)
    cuts: bool = False  # connections may break: their frontend was killed
    ends: bool = False  # the server is gone afterwards
    early: bool = False  # begins before the streams do, so that their beginnings are harmed, too
