"""Tasks for a measuring process: a task that succeeds, and a task for each kind of failure."""

import logging
import os
import time
from collections.abc import Iterator

from bench.gpu.environment import Environment, Row


def fine(env: Environment, argument: str) -> Iterator[Row]:
    env.limits["seen"] = env.limits.get("seen", 0.0) + 1
    yield {"what": argument, "value": env.limits["seen"]}


def warns(env: Environment, argument: str) -> Iterator[Row]:
    logging.getLogger("sluice.graphs").warning("slower from now on")
    yield {"what": argument, "value": 1.0}


def raises(env: Environment, argument: str) -> Iterator[Row]:
    yield {"what": argument, "value": 1.0}
    raise ValueError("no such thing\nand more")


def dies(env: Environment, argument: str) -> Iterator[Row]:
    yield {"what": argument, "value": 1.0}
    os._exit(9)


def hangs(env: Environment, argument: str) -> Iterator[Row]:
    yield {"what": argument, "value": 1.0}
    time.sleep(1000)
