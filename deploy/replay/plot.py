"""Plots the latencies of a replay: the share of answers that had arrived after each time. Needs matplotlib."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from deploy.replay.report import Latencies
from deploy.supervisor.child_command import CliError

BAD_USE = 2  # exit code
FORMATS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Raises CliError if the picture could not be drawn. Called before any request is sent."""
    if path.suffix not in FORMATS:
        raise CliError(f"--plot {path}: its name must end with {', '.join(FORMATS)}", BAD_USE)
    if find_spec("matplotlib") is None:
        raise CliError("--plot needs matplotlib: pip install matplotlib", BAD_USE)


def draw(rows: Sequence[Latencies], path: Path) -> None:
    """Writes the picture. Raises CliError when the file cannot be written."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (name, recorded, replayed) in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        for label, times in (("recorded", recorded), ("replayed", replayed)):
            axes.step(sorted(times), [100 * (i + 1) / len(times) for i in range(len(times))], label=label)
        axes.set(title=name, xlabel="milliseconds", ylabel="% of the answers", ylim=(0, 100))
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise CliError(f"--plot {path} cannot be written: {error.strerror}", BAD_USE) from error
