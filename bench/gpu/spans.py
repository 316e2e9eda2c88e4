"""What ran on the device and when, from torch's profiler: read from the trace it writes, which every version has."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from bench.gpu.place import Place

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Span:
    """Microseconds on the trace's clock."""

    name: str
    begin: float
    length: float


def record(place: Place, run: Callable[[], object], trace: Path) -> list[Span]:
    """Runs it under the profiler, leaves the trace at `trace`; spans on the device, by time. On the CPU: operators."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if place.cuda else [])
    with profile(activities=activities) as profiler:
        run()
        place.clock.wait()
    profiler.export_chrome_trace(str(trace))
    wanted = ON_DEVICE if place.cuda else ("cpu_op",)
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [
        Span(event["name"], float(event["ts"]), float(event["dur"])) for event in events if event.get("cat") in wanted
    ]
    return sorted(spans, key=lambda span: span.begin)


def gaps(spans: list[Span]) -> list[float]:
    """Microseconds between spans in which nothing ran, in order; what overlaps counts once."""
    found, end = [], spans[0].begin if spans else 0.0
    for span in spans:
        if span.begin > end:
            found.append(span.begin - end)
        end = max(end, span.begin + span.length)
    return found


def extent(spans: list[Span]) -> float:
    """From the first begin to the last end."""
    return max(span.begin + span.length for span in spans) - spans[0].begin if spans else 0.0
