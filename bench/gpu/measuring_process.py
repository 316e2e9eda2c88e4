"""The measuring process: reads tasks from stdin, writes rows to a pipe. driver.py starts it.

python -m bench.gpu.measuring_process FD
"""

import gc
import importlib
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu.clock import clock_of
from bench.gpu.context import Place, Row
from bench.gpu.sections import NOTE
from bench.gpu.shapes import FULL, SMALL
from bench.gpu.tables import FAIL
from deploy.supervisor.parent_death import die_with
from shared.config import ConfigError
from worker.model.device import pick_device

Say = Callable[[dict[str, Any]], None]


def main(pipe: int) -> None:
    os.set_inheritable(pipe, False)
    order = json.load(sys.stdin)
    die_with(order["parent"])
    warnings.simplefilter("ignore")
    heard = _Heard()
    logging.getLogger("sluice").addHandler(heard)
    with os.fdopen(pipe, "w", buffering=1) as out:

        def say(event: dict[str, Any]) -> None:
            out.write(json.dumps(event) + "\n")

        try:
            pick_device(order["options"]["device"])
        except ConfigError as error:
            return say({"refused": str(error)})
        place = _place(order)
        if not place.cuda:
            torch.set_num_threads(1)  # tiny sizes: more would only wait for each other
        say({"about": _about(place)})
        for task in order["tasks"]:
            say({"begin": task["call"]})
            if not _task(place, task, say, heard):
                return


def _place(order: dict[str, Any]) -> Place:
    options = order["options"]
    device = torch.device(options["device"])
    return Place(
        device=device,
        dtype=torch.bfloat16,
        sizes=SMALL if options["small"] else FULL,
        clock=clock_of(device),
        models=tuple(options["models"]),
        folder=Path(order["folder"]),
        seed=options["seed"],
        deadline=order["deadline"],
        trace=Path(options["trace"]) if options["trace"] else None,
        facts=order["facts"],
    )


class _Heard(logging.Handler):
    """What the worker warns of, each thing once: a fast path that is switched off should not go unseen."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.lines[record.getMessage()] = None


def _task(place: Place, task: dict[str, Any], say: Say, heard: _Heard) -> bool:
    """One task from begin to end; False when the device is not to be used any more."""
    begun, failed, known = time.monotonic(), "", dict(place.facts)
    heard.lines.clear()
    try:
        for row in _rows(place, task):
            say({"row": row})
            if place.facts != known:
                known = dict(place.facts)
                say({"fact": known})
    except Exception as error:
        traceback.print_exc()
        failed = _why(error)
    for line in heard.lines:
        say({"row": {task["first"]: task["argument"], "result": FAIL, NOTE: f"warned: {line[:300]}"}})
    broken = bool(failed) and not _works(place)
    say({"end": time.monotonic() - begun, "failed": failed, "broken": broken})
    gc.collect()
    if place.cuda and not broken:
        torch.cuda.empty_cache()
    return not broken


def _rows(place: Place, task: dict[str, Any]) -> Iterator[Row]:
    module, function = task["call"].split(":")
    if late := place.short(task["need_s"]):
        yield {task["first"]: task["argument"] or function, NOTE: late}
        return
    yield from getattr(importlib.import_module(module), function)(place, task["argument"])


def _why(error: Exception) -> str:
    """Type, first line and where in our own files."""
    root = str(Path(__file__).parents[2])
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(root)]
    where = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}{where}"


def _works(place: Place) -> bool:
    """After a fault every call on the device fails."""
    try:
        torch.ones(1, device=place.device).add_(1)
        place.clock.wait()
    except Exception:
        return False
    return True


def _about(place: Place) -> str:
    parts = [f"torch {torch.__version__}", f"Python {sys.version.split()[0]}"]
    if place.cuda:
        import triton

        about = torch.cuda.get_device_properties(place.device)
        parts += [f"triton {triton.__version__}"]
        parts += [f"{about.name}, {about.multi_processor_count} multiprocessors, {about.total_memory / 1e9:.0f} GB"]
    return ", ".join([*parts, f"device {place.device}", f"seed {place.seed}"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
