"""Records in a file which parts have been run and how they ended, so that the command can always be repeated.

A part that ended by itself is not run again. A part that was cut, that failed, or that left out something for lack of
time is tried once more, after the parts that have never been run. A part that could not start, because a package or
time was missing, is tried by every command.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.calls.parts import MOST_ATTEMPTS, Part
from shared.config.declaration import ConfigError

FILE = "state.json"
DONE, CHECK_FAILED, INCOMPLETE, FAILED, CUT, LEFT_OUT = (
    "done",
    "check failed",
    "incomplete",
    "failed",
    "cut",
    "left out",
)
FINAL = (DONE, CHECK_FAILED)


@dataclass(slots=True)
class Outcome:
    """How a part's last attempt ended. attempts: how often the part was started. note: the reason, in a few words."""

    status: str
    attempts: int = 0
    seconds: float = 0.0
    note: str = ""


@dataclass(slots=True)
class State:
    """The results of all commands so far. outcomes: part name → outcome."""

    folder: Path
    device: str
    models: tuple[str, ...]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, device: str, models: tuple[str, ...]) -> "State":
        """Reads an earlier command's state, if any. Raises ConfigError if its device or models were different."""
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FILE).exists():
            return cls(folder, device, models)
        found: dict[str, Any] = json.loads((folder / FILE).read_text())
        if (found["device"], tuple(found["models"])) != (device, models):
            raise ConfigError(
                f"--call: the earlier results are those of --device {found['device']} --models "
                f"{','.join(found['models'])}; continue with these flags, or name another folder with --last"
            )
        outcomes = {name: Outcome(**outcome) for name, outcome in found["outcomes"].items()}
        return cls(folder, device, models, outcomes)

    def write(self) -> None:
        data = {"device": self.device, "models": self.models, "outcomes": {}}
        data["outcomes"] = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        temporary = self.folder / f".{FILE}"
        temporary.write_text(json.dumps(data, indent=1) + "\n")
        temporary.replace(self.folder / FILE)

    def attempts(self, part: Part) -> int:
        outcome = self.outcomes.get(part.name)
        return outcome.attempts if outcome else 0

    def remaining(self, parts: list[Part]) -> list[Part]:
        """Returns the parts to run: first essential parts, then parts never started, then parts to try once more."""
        open_parts = [part for part in parts if part.essential or self._open(part)]
        return sorted(open_parts, key=lambda part: 0 if part.essential else 1 + self.attempts(part))  # keeps the order

    def _open(self, part: Part) -> bool:
        outcome = self.outcomes.get(part.name)
        return outcome is None or (outcome.status not in FINAL and outcome.attempts < MOST_ATTEMPTS)
