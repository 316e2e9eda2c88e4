"""The result of a check, and a Markdown table of all results."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Row:
    """The result of one check. wrong: a sentence for each error. notes: further remarks"""

    check: str
    compared: str = ""
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def expect(self, true: bool, otherwise: str) -> None:
        if not true:
            self.wrong.append(otherwise)


def table(rows: Iterable[Row]) -> str:
    lines = ["| check | compared | wrong |", "| --- | --- | --: |"]
    return "\n".join(lines + [f"| {row.check} | {row.compared} | {len(row.wrong)} |" for row in rows])
