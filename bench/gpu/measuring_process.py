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

from bench.gpu.calls.packages import explained
from bench.gpu.clock import clock_of
from bench.gpu.compile_time import watch_compilations
from bench.gpu.environment import Environment, Row
from bench.gpu.sections import NOTE
from bench.gpu.shapes import FULL, SMALL
from bench.gpu.tables import FAIL
from deploy.launcher.child_command import die_with
from shared.config.declaration import ConfigError
from worker.device import pick_device

Send = Callable[[dict[str, Any]], None]


def main(pipe: int) -> None:
    os.set_inheritable(pipe, False)
    order = json.load(sys.stdin)
    die_with(order["parent"])
    warnings.simplefilter("ignore")
    warnings_log = _WarningLog()
    logging.getLogger("sluice").addHandler(warnings_log)
    with os.fdopen(pipe, "w", buffering=1) as out:

        def send(event: dict[str, Any]) -> None:
            out.write(json.dumps(event) + "\n")

        try:
            pick_device(order["options"]["device"])
        except ConfigError as error:
            return send({"refused": str(error)})
        env = _environment(order)
        if not env.cuda:
            torch.set_num_threads(1)  # with these tiny sizes, threads would mostly wait for each other
        send({"about": _about(env)})
        if env.cuda:
            watch_compilations(lambda seconds: send({"compiled": seconds}))
        for task in order["tasks"]:
            send({"begin": task["call"]})
            if not _task(env, task, send, warnings_log):
                return


def _environment(order: dict[str, Any]) -> Environment:
    options = order["options"]
    device = torch.device(options["device"])
    return Environment(
        device=device,
        dtype=torch.bfloat16,
        sizes=SMALL if options["small"] else FULL,
        clock=clock_of(device),
        models=tuple(options["models"]),
        folder=Path(order["folder"]),
        seed=options["seed"],
        deadline=order["deadline"],
        trace=Path(options["trace"]) if options["trace"] else None,
        tiles=Path(options["tiles"]) if options["tiles"] else None,
        limits=order["facts"],
    )


class _WarningLog(logging.Handler):
    """Collects the worker's distinct warnings, which show for example that a fast path is switched off."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.lines[record.getMessage()] = None


def _task(env: Environment, task: dict[str, Any], send: Send, warnings_log: _WarningLog) -> bool:
    """Runs one task. Returns False if the device is broken, so that this process must not use it any more."""
    begun, failed, sent = time.monotonic(), "", dict(env.limits)
    warnings_log.lines.clear()
    try:
        for row in _rows(env, task):
            send({"row": row})
            if env.limits != sent:
                sent = dict(env.limits)
                send({"fact": sent})
    except Exception as error:
        traceback.print_exc()
        failed = _reason(error)
    for line in warnings_log.lines:
        send({"row": {task["first"]: task["argument"], "result": FAIL, NOTE: f"warned: {line[:300]}"}})
    broken = bool(failed) and not _device_works(env)
    send({"end": time.monotonic() - begun, "failed": failed, "broken": broken})
    gc.collect()
    if env.cuda and not broken:
        torch.cuda.empty_cache()
    return not broken


def _rows(env: Environment, task: dict[str, Any]) -> Iterator[Row]:
    module, function = task["call"].split(":")
    if late := env.skip_reason(task["need_s"]):
        yield {task["first"]: task["argument"] or function, NOTE: late}
        return
    yield from getattr(importlib.import_module(module), function)(env, task["argument"])


def _reason(error: Exception) -> str:
    """Describes an error: its type, the first line of its message, and the innermost line in our own files."""
    root = str(Path(__file__).parents[2])
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(root)]
    where = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    if isinstance(error, ModuleNotFoundError):
        return explained(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}{where}"


def _device_works(env: Environment) -> bool:
    """Returns whether the device still computes. After a fault, every call on it fails."""
    try:
        torch.ones(1, device=env.device).add_(1)
        env.clock.wait()
    except Exception:
        return False
    return True


def _about(env: Environment) -> str:
    parts = [f"torch {torch.__version__}", f"Python {sys.version.split()[0]}"]
    if env.cuda:
        import triton

        about = torch.cuda.get_device_properties(env.device)
        parts += [f"triton {triton.__version__}"]
        parts += [f"{about.name}, {about.multi_processor_count} multiprocessors, {about.total_memory / 1e9:.0f} GB"]
    return ", ".join([*parts, f"device {env.device}", f"seed {env.seed}"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
