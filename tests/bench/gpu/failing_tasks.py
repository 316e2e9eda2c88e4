"""Tasks for a measuring process: what goes well, and every way in which it may not."""

import logging
import os
import time
from collections.abc import Iterator

from bench.gpu.context import Place, Row


def fine(place: Place, argument: str) -> Iterator[Row]:
    place.facts["seen"] = place.facts.get("seen", 0.0) + 1
    yield {"what": argument, "value": place.facts["seen"]}


def warns(place: Place, argument: str) -> Iterator[Row]:
    logging.getLogger("sluice.graphs").warning("slower from now on")
    yield {"what": argument, "value": 1.0}


def raises(place: Place, argument: str) -> Iterator[Row]:
    yield {"what": argument, "value": 1.0}
    raise ValueError("no such thing\nand more")


def dies(place: Place, argument: str) -> Iterator[Row]:
    yield {"what": argument, "value": 1.0}
    os._exit(9)


def hangs(place: Place, argument: str) -> Iterator[Row]:
    yield {"what": argument, "value": 1.0}
    time.sleep(1000)
