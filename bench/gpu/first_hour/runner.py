"""Runs the parts that have no result yet, each in its own process, within the given time."""

import time
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.first_hour.packages import missing, sentence
from bench.gpu.first_hour.part_process import run
from bench.gpu.first_hour.parts import Part, parts_for
from bench.gpu.first_hour.report import PAGE, folder_of, overview, write_report
from bench.gpu.first_hour.state import CUT, DONE, FINAL, LEFT_OUT, Outcome, State

MINUTES = 60.0


@dataclass(slots=True)
class FirstHour:
    """Runs parts and records their outcomes. deadline: seconds of time.monotonic."""

    state: State
    parts: list[Part]
    deadline: float

    def run(self) -> bool:
        """Runs the remaining parts. Returns whether every part has ended well."""
        for part in self.state.remaining(self.parts):
            outcome = self._run(part)
            if part.essential and outcome.status not in FINAL:
                print(f"Nothing else is run, because {part.name} did not end well: {outcome.note}", flush=True)
                break
        print(overview(self.state, self.parts), f"\nAll results: {self.state.folder / PAGE}", sep="\n", flush=True)
        return all(self._ended_well(part) for part in self.parts)

    def _ended_well(self, part: Part) -> bool:
        outcome = self.state.outcomes.get(part.name)
        return outcome is not None and outcome.status == DONE

    def _run(self, part: Part) -> Outcome:
        """Runs a part, records its outcome and returns it."""
        attempts, left = self.state.attempts(part), self.deadline - time.monotonic()
        if why := self._reason_to_leave_out(part, left):
            return self._keep(part, Outcome(LEFT_OUT, attempts, note=why))
        folder = folder_of(self.state, part, self.parts)
        print(f"{part.name}: {part.title} (at most {min(part.cap_s, left):.0f} s)", flush=True)
        # Recorded as cut before it runs: if this command is killed, a later command runs the part again.
        self._keep(part, Outcome(CUT, attempts + 1, note="the command was ended meanwhile"))
        outcome = run(part, folder, self.state.device, self.state.models, min(part.cap_s, left))
        outcome.attempts = attempts + 1
        print(f"  {outcome.status} after {outcome.seconds:.0f} s {outcome.note}".rstrip(), flush=True)
        return self._keep(part, outcome)

    def _reason_to_leave_out(self, part: Part, left: float) -> str:
        if absent := missing(part.packages):
            return sentence(absent)
        return "" if left >= part.need_s else f"{max(left, 0):.0f} s left, it takes at least {part.need_s:.0f}"

    def _keep(self, part: Part, outcome: Outcome) -> Outcome:
        """Records a part's outcome, but keeps the results of an earlier attempt if the part was left out now."""
        before = self.state.outcomes.get(part.name)
        if outcome.status != LEFT_OUT or before is None or not before.attempts:
            self.state.outcomes[part.name] = outcome
        self.state.write()
        write_report(self.state, self.parts)
        return outcome


def first_hour(folder: Path, device: str, models: tuple[str, ...], minutes: float) -> int:
    """Runs the first hour. Returns 0 if every part has ended well. Raises ConfigError if the folder's results were made
    with other flags."""
    parts = parts_for(models)
    state = State.read(folder.absolute(), device, models)
    deadline = time.monotonic() + 60 * minutes
    return 0 if FirstHour(state, parts, deadline).run() else 1
