"""Writes all results so far to one page: each part with its outcome, then each part's own page."""

from pathlib import Path

from bench.client.summary import aligned
from bench.gpu.calls.part_process import OUTPUT
from bench.gpu.calls.parts import PARTS, Part
from bench.gpu.calls.state import State

PAGE, PART_PAGE = "REPORT.md", "report.md"
LAST_LINES = 15


def folder_of(state: State, part: Part) -> Path:
    return state.folder / part.name


def write_report(state: State) -> None:
    """Writes REPORT.md with the parts of all commands so far. Called after every part, so that it survives failures."""
    parts = [part for part in PARTS if part.name in state.outcomes]
    head = [f"# Device {state.device}, models {', '.join(state.models)}", "", overview(state, parts), ""]
    pages = [line for part in parts for line in _page(part, folder_of(state, part))]
    (state.folder / PAGE).write_text("\n".join([*head, *pages]) + "\n")


def overview(state: State, parts: list[Part]) -> str:
    rows = [["part", "what", "how it ended", "attempts", "s", "note"]]
    for part in parts:
        if outcome := state.outcomes.get(part.name):
            cells = [outcome.status, str(outcome.attempts), f"{outcome.seconds:.0f}", outcome.note.replace("|", "/")]
        else:
            cells = ["not run yet", "", "", ""]
        rows.append([part.name, part.title, *cells])
    return aligned(rows)


def _page(part: Part, folder: Path) -> list[str]:
    own, output = folder / PART_PAGE, folder / OUTPUT
    if own.exists():
        return [f"## {part.name}", "", own.read_text()]
    if output.exists():
        last = output.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return [f"## {part.name}", "", "```", *last, "```", ""]
    return []
