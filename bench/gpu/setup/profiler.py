"""Records what ran on the device and when, from the trace file of torch's profiler, which all torch versions write."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from bench.gpu.environment import Environment

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel, copy or operator. begin, length: microseconds on the clock of the trace."""

    name: str
    begin: float
    length: float


def record(env: Environment, run: Callable[[], object], copy: Path | None = None) -> list[Span]:
    """Calls `run` twice under the profiler and returns the spans of the second call, ordered by time.

    The first call warms up the profiler, which takes a second to start. The spans are those on the device; on the CPU
    they are operators. copy: the path to which the trace is copied, if given.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if env.cuda else [])
    trace = env.folder / "trace.json"
    for _ in range(2):
        with profile(activities=activities) as profiler:
            run()
            env.clock.wait()
    profiler.export_chrome_trace(str(trace))
    if copy is not None:
        shutil.copy(trace, copy)
    wanted = ON_DEVICE if env.cuda else ("cpu_op",)
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [
        Span(event["name"], float(event["ts"]), float(event["dur"])) for event in events if event.get("cat") in wanted
    ]
    if not spans:
        raise RuntimeError("the profiler saw nothing run on the device")
    return sorted(spans, key=lambda span: span.begin)


def gaps(spans: list[Span]) -> list[float]:
    """Returns the lengths in microseconds of the gaps between spans, in order of time. Spans may overlap."""
    found, end = [], spans[0].begin if spans else 0.0
    for span in spans:
        if span.begin > end:
            found.append(span.begin - end)
        end = max(end, span.begin + span.length)
    return found


def extent(spans: list[Span]) -> float:
    """Returns the microseconds from the start of the first span to the last end of a span."""
    return max(span.begin + span.length for span in spans) - spans[0].begin if spans else 0.0
