"""Reports of a replay: a timeline for the terminal, figures for a JSON file, a plot for a page.

Latency percentiles are not computed here: the command uses bench/client/summary.py for them, as the benchmarks do.
"""

import shutil
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

from bench.simulate.replay import Replay, Sample

RAMP = " .:-=+*#%@"
MIN_WIDTH, MAX_WIDTH = 20, 100
LABEL = 14

ROWS: dict[str, Callable[[Sample], float]] = {
    "waiting": lambda sample: sample.waiting,
    "running": lambda sample: sample.running,
    "batch": lambda sample: sample.batch,
    "step tokens": lambda sample: sample.tokens,
    "pages owned": lambda sample: sample.owned,
    "pages cached": lambda sample: sample.cached,
    "pages free": lambda sample: sample.free,
    "preemptions": lambda sample: sample.preempted,
}


def width() -> int:
    """Returns the number of columns of a timeline in this terminal."""
    return max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size().columns - LABEL - 8))


def timeline(replay: Replay, columns: int) -> str:
    """Draws a row for each quantity: the peak in each time slice, as a character, then the overall maximum."""
    lines = [_row(name, peaks(replay, quantity, columns)) for name, quantity in ROWS.items()]
    end = f"{replay.end:.3g} s"
    return "\n".join([*lines, f"{'':{LABEL}}|0{end:>{columns - 1}}|"])


def peaks(replay: Replay, quantity: Callable[[Sample], float], columns: int) -> list[float]:
    """Returns the peak of a quantity in each of `columns` equal slices of the replay."""
    highest = [0.0] * columns
    scale = columns / replay.end if replay.end else 0.0
    for sample in replay.timeline:
        first = min(columns - 1, int(sample.at * scale))
        last = min(columns, ceil((sample.at + sample.seconds) * scale))
        for column in range(first, max(first + 1, last)):
            highest[column] = max(highest[column], quantity(sample))
    return highest


def outcome(replay: Replay) -> str:
    """Describes in one line how the requests ended, and in how many steps."""
    refused = len(replay.requests) - len(replay.finished)
    return (
        f"{len(replay.finished)} finished, {replay.refused} refused with 503, {refused - replay.refused} impossible, "
        f"{replay.preemptions} preemptions, {replay.steps} steps in {replay.end:.1f} s"
    )


def numbers(replay: Replay) -> dict[str, Any]:
    """Returns the content of the JSON file: counts, one record for each request, and the timeline by columns."""
    return {
        "end": replay.end,
        "steps": replay.steps,
        "preemptions": replay.preemptions,
        "refused": replay.refused,
        "requests": [
            {
                "sent": request.sent,
                "done": request.done,
                "prompt_tokens": request.prompt_tokens,
                "cached_tokens": request.cached_tokens,
                "preemptions": request.preemptions,
                "refused": request.refused,
                "stamps": request.stamps,
            }
            for request in replay.requests
        ],
        "timeline": {name: [sample[i] for sample in replay.timeline] for i, name in enumerate(Sample._fields)},
    }


def plot(replays: dict[str, Replay], path: Path) -> None:
    """Draws three charts for each replay: queue and batch, pages, latency of each request. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(replays), 8), layout="constrained")
    grid = figure.subplots(3, len(replays), squeeze=False)
    for column, (name, replay) in enumerate(replays.items()):
        _queue_chart(grid[0][column], name, replay)
        _pages_chart(grid[1][column], replay)
        _latency_chart(grid[2][column], replay)
    figure.savefig(path)


def _queue_chart(axes: Any, name: str, replay: Replay) -> None:
    at = [sample.at for sample in replay.timeline]
    for label in ("waiting", "running", "batch"):
        axes.step(at, [ROWS[label](sample) for sample in replay.timeline], where="post", label=label)
    axes.set(title=name, ylabel="sequences")
    axes.legend()


def _pages_chart(axes: Any, replay: Replay) -> None:
    at = [sample.at for sample in replay.timeline]
    shares = [[getattr(sample, label) for sample in replay.timeline] for label in ("owned", "cached", "free")]
    axes.stackplot(at, *shares, labels=("owned", "cached", "free"))
    axes.set(ylabel="pages")
    axes.legend()


def _latency_chart(axes: Any, replay: Replay) -> None:
    requests = [request for request in replay.finished if request.stamps]
    sent = [request.sent for request in requests]
    axes.plot(sent, [request.ttft for request in requests], "o", label="TTFT")
    axes.plot(sent, [max(request.gaps, default=0.0) for request in requests], "x", label="longest ITL")
    axes.set(xlabel="sent, seconds", ylabel="seconds")
    axes.legend()


def _row(name: str, values: list[float]) -> str:
    most = max(values, default=0.0)
    levels = len(RAMP) - 1
    marks = "".join(RAMP[-int(-value * levels // most)] if most else RAMP[0] for value in values)
    return f"{name:<{LABEL}}|{marks}| {most:.0f}"
