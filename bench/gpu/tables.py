"""Collects the rows of each section and formats them as text, Markdown and JSON."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bench.client.summary import aligned, number
from bench.gpu.sections import NOTE, Section

Cell = str | float | None
PASS, FAIL = "pass", "FAIL"


@dataclass(slots=True)
class Table:
    """The rows of a section.

    failures: the number of tasks that raised an exception, hung or died. compilations: seconds of each compilation.
    """

    section: Section
    rows: list[dict[str, Cell]] = field(default_factory=list)
    failures: int = 0
    seconds: float = 0.0
    compilations: list[float] = field(default_factory=list)

    def add(self, row: Mapping[str, Cell]) -> None:
        self.rows.append(dict(row))

    def fail(self, argument: str, why: str) -> None:
        self.failures += 1
        self.rows.append({self.section.columns[0]: argument or self.section.name, NOTE: f"failed: {why}"})

    @property
    def well(self) -> bool:
        return not self.failures and all(row.get("result", PASS) == PASS for row in self.rows)

    def text(self) -> str:
        columns = [*self.section.columns]
        if any(row.get(NOTE) for row in self.rows):
            columns.append(NOTE)
        cells = [[shown(row.get(column)) for column in columns] for row in self.rows]
        table = aligned([columns, *cells]) if cells else "nothing was measured"
        return f"### {self.section.title}\n\n{table}\n"


def shown(cell: Cell) -> str:
    match cell:
        case None:
            return ""
        case float() | int():
            return number(cell) if not math.isinf(cell) else "inf"
        case _:
            return cell.replace("|", "/").replace("\n", " ")


def page(tables: Iterable[Table], head: Iterable[str]) -> str:
    """Returns the lines of `head` and all tables as Markdown."""
    return "\n".join([*head, "", *(table.text() for table in tables)])


def as_data(tables: Iterable[Table]) -> dict[str, object]:
    """Returns all tables as data for JSON."""
    return {
        table.section.name: {"title": table.section.title, "seconds": round(table.seconds, 1), "rows": table.rows}
        for table in tables
    }
