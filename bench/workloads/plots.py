"""Pictures of results: distributions and time series, with one colour per mode.

Uses matplotlib without a display. No other module of this folder needs matplotlib.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.client.load_client import Record
from bench.client.summary import percentile, weight
from bench.workloads.measure import Result

SIZE = (15.0, 7.6)  # inches, for the six panels of one workload
DPI = 100
STYLE = {
    "font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.grid": True, "grid.color": "#e8e8e8",
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white",
    "axes.facecolor": "white", "legend.frameon": False,
}  # fmt: skip
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#000000", "#80ba5a", "#a0522d")
WIDTHS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # possible bin widths in seconds; short runs use smaller ones
BINS = 40
SCATTER = 5000  # maximum number of dots for one mode

Axes = Any  # matplotlib's Axes, whose type is known only where matplotlib is installed
Modes = Mapping[str, Sequence[Record]]  # successful records, by mode


def png(groups: Mapping[str, Sequence[Result]]) -> bytes:
    """Draws one picture with all workloads; the modes of a workload share its panels."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(SIZE[0], SIZE[1] * len(groups)), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        for part, (workload, group) in zip(_parts(figure, len(groups)), groups.items(), strict=True):
            _panels(part, workload, {result.mode: _good(result.records) for result in group})
        out = io.BytesIO()
        figure.savefig(out, format="png")
        return out.getvalue()


def bins(points: Sequence[tuple[float, float]], width: float) -> dict[float, list[float]]:
    """Groups values by the centre of their time bin; a bin without values has an empty list."""
    found: dict[int, list[float]] = {}
    for time, value in points:
        found.setdefault(int(time / width), []).append(value)
    whole = range(min(found, default=0), max(found, default=-1) + 1)
    return {(index + 0.5) * width: found.get(index, []) for index in whole}


def _parts(figure: Any, count: int) -> Sequence[Any]:
    return list(figure.subfigures(count, 1, squeeze=False, hspace=0.03)[:, 0])


def _good(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if not record.error]


def _panels(figure: Any, workload: str, modes: Modes) -> None:
    span = max((record.done for records in modes.values() for record in records), default=1.0)
    width = next((width for width in WIDTHS if span / width <= BINS), WIDTHS[-1])
    panels = figure.subplots(2, 3).flat
    _distribution(panels[0], "Time to first token (TTFT)", modes, lambda record: [record.ttft])
    _distribution(panels[1], "Time between tokens (ITL)", modes, lambda record: record.gaps, log=True)
    _distribution(panels[2], "Whole answer (E2E)", modes, lambda record: [record.done - record.sent])
    _waits(panels[3], modes, width)
    _throughput(panels[4], modes, width)
    _in_flight(panels[5], modes)
    figure.align_ylabels()
    figure.suptitle(workload, fontsize=14, fontweight="bold", x=0.01, ha="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=len(labels), fontsize=11)


def _distribution(
    ax: Axes, title: str, modes: Modes, values: Callable[[Record], list[float]], *, log: bool = False
) -> None:
    found = {name: sorted(1e3 * value for record in modes[name] for value in values(record)) for name in modes}
    # A logarithmic axis cannot start at 0.
    least = max((percentile(each, 0.5) for each in found.values() if each), default=0.0) / 50 or 0.01
    for (name, each), colour in zip(found.items(), COLOURS, strict=False):
        shares = [100 * index / len(each) for index in range(len(each) + 1)] if each else []
        places = [max(least, value) if log else value for value in each[:1] + each]
        ax.step(places, shares, where="post", color=colour, label=name)
    ax.set(title=title, xlabel="ms", ylabel="share at or below, %", ylim=(0, 103))
    if log:
        _log(ax, "x")
    else:
        ax.set_xlim(left=0)
    _note_if_empty(ax, any(found.values()))


def _waits(ax: Axes, modes: Modes, width: float) -> None:
    """Draws every gap as a dot, and each time bin's 99th percentile as a line, which shows stalls by long prompts."""
    for records, colour in zip(modes.values(), COLOURS, strict=False):
        points = sorted(
            (stamp, 1e3 * gap) for record in records for stamp, gap in zip(record.stamps[1:], record.gaps, strict=True)
        )
        some = points[:: math.ceil(len(points) / SCATTER) or 1]
        if some:
            few = len(some) < 1000
            ax.plot(
                *zip(*some, strict=True), ".",
                color=colour, alpha=0.5 if few else 0.2, markersize=5 if few else 3, markeredgewidth=0,
            )  # fmt: skip
        worst = {time: percentile(values, 0.99) for time, values in bins(points, width).items() if values}
        ax.plot(list(worst), list(worst.values()), color=colour, marker="o", markersize=3, linewidth=1.5)
    ax.set(title=f"Time between tokens, and its p99 per {width:g} s", xlabel="seconds since the start", ylabel="ms")
    ax.set_xlim(left=0)
    _log(ax, "y")
    _note_if_empty(ax, bool(ax.lines and any(len(line.get_xdata()) for line in ax.lines)))


def _throughput(ax: Axes, modes: Modes, width: float) -> None:
    for records, colour in zip(modes.values(), COLOURS, strict=False):
        points = [
            (stamp, count * weight(record))
            for record in records
            for stamp, count in zip(record.stamps, record.tokens, strict=True)
        ]
        rates = {time: sum(counts) / width for time, counts in bins(points, width).items()}
        ax.step(list(rates), list(rates.values()), where="mid", color=colour)
    ax.set(title=f"Output, per {width:g} s", xlabel="seconds since the start", ylabel="tokens/s")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)


def _in_flight(ax: Axes, modes: Modes) -> None:
    for records, colour in zip(modes.values(), COLOURS, strict=False):
        changes = sorted([(r.sent, 1) for r in records] + [(r.done, -1) for r in records])
        level, times, levels = 0, [0.0], [0]
        for time, change in changes:
            level += change
            times.append(time)
            levels.append(level)
        ax.step(times, levels, where="post", color=colour)
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.set(title="Requests in flight", xlabel="seconds since the start", ylabel="requests")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)


def _log(ax: Axes, which: str) -> None:
    """Makes the axis logarithmic with plain numbers at 1, 2 and 5; it stays linear if no value is above 0."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis = ax.xaxis if which == "x" else ax.yaxis
    low, high = axis.get_data_interval()
    if not 0 < low <= high:
        return
    ax.set(**{f"{which}scale": "log"})
    wide = high / low > 300
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _note_if_empty(ax: Axes, full: bool) -> None:
    if not full:
        ax.text(0.5, 0.5, "nothing to show", transform=ax.transAxes, ha="center", va="center", color="#888888")
