"""What a check has compared and found, and all of them as a Markdown table."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Row:
    """One check. wrong: a sentence for each error. notes: further remarks"""

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
