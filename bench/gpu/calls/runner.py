"""Runs the parts of one command: first those that run side by side, then one after another.

After each part, the results so far are packed, so that they survive if the machine is taken away.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu.calls.archives import RESULTS, pack_cache, pack_results, unpack_cache, unpack_results
from bench.gpu.calls.packages import missing, sentence
from bench.gpu.calls.part_process import PartProcess
from bench.gpu.calls.parts import Part, parts_for
from bench.gpu.calls.report import PAGE, folder_of, overview, write_report
from bench.gpu.calls.state import CUT, DONE, FINAL, LEFT_OUT, Outcome, State

MINUTES = 9.0
PACKING_S = 25.0  # kept for packing the cache at the end
POLL_S = 0.05
CACHE = "TRITON_CACHE_DIR"
USUAL_CACHE = "/var/tmp/sluice-triton"


@dataclass(slots=True)
class Call:
    """Runs parts and records their outcomes. deadline: seconds of time.monotonic. out: where results are packed."""

    state: State
    parts: list[Part]
    deadline: float
    out: Path

    def run(self) -> bool:
        """Runs the remaining parts. Returns whether every part has ended well."""
        remaining = self.state.remaining(self.parts)
        alone = [[part] for part in remaining if not part.beside]
        beside = [part for part in remaining if part.beside]
        essential = [stage for stage in alone if stage[0].essential]
        for stage in (*essential, beside, *(stage for stage in alone if not stage[0].essential)):
            outcomes = self._run(stage)
            ended = zip(stage, outcomes, strict=True)
            if bad := [(part.name, one.note) for part, one in ended if part.essential and one.status not in FINAL]:
                print(f"Nothing else is run, because {bad[0][0]} did not end well: {bad[0][1]}", flush=True)
                break
        print(overview(self.state, self.parts), flush=True)
        return all(self._ended_well(part) for part in self.parts)

    def _ended_well(self, part: Part) -> bool:
        outcome = self.state.outcomes.get(part.name)
        return outcome is not None and outcome.status == DONE

    def _run(self, stage: list[Part]) -> list[Outcome]:
        """Runs the parts of a stage side by side, records their outcomes and returns them."""
        running = dict[str, PartProcess]()
        try:
            for part in stage:
                attempts, left = self.state.attempts(part), self.deadline - time.monotonic()
                if why := self._reason_to_leave_out(part, left):
                    self._keep(part, Outcome(LEFT_OUT, attempts, note=why))
                    continue
                seconds = min(part.cap_s, left)
                print(f"{part.name}: {part.title} (at most {seconds:.0f} s)", flush=True)
                # Recorded as cut before it runs: if this command is killed, a later command runs the part again.
                self._keep(part, Outcome(CUT, attempts + 1, note="the command was ended meanwhile"))
                folder = folder_of(self.state, part)
                running[part.name] = PartProcess(part, folder, self.state.device, self.state.models, seconds)
            while running:
                for name, process in list(running.items()):
                    if outcome := process.outcome():
                        del running[name]
                        outcome.attempts = self.state.attempts(process.part)
                        self._keep(process.part, outcome)
                        said = f"  {name} {outcome.status} after {outcome.seconds:.0f} s {outcome.note}"
                        print(said.rstrip(), flush=True)
                time.sleep(POLL_S)
        finally:
            for process in running.values():
                process.end()
        return [self.state.outcomes[part.name] for part in stage]

    def _reason_to_leave_out(self, part: Part, left: float) -> str:
        if absent := missing(part.packages):
            return sentence(absent)
        return "" if left >= part.need_s else f"{max(left, 0):.0f} s left, it takes at least {part.need_s:.0f}"

    def _keep(self, part: Part, outcome: Outcome) -> None:
        """Records a part's outcome, but keeps the results of an earlier attempt if the part was left out now."""
        before = self.state.outcomes.get(part.name)
        if outcome.status != LEFT_OUT or before is None or not before.attempts:
            self.state.outcomes[part.name] = outcome
        self.state.write()
        write_report(self.state)
        pack_results(self.state.folder, self.out)


def run_call(call: str, out: Path, last: Path, device: str, models: tuple[str, ...], minutes: float) -> int:
    """Runs one command. Returns 0 if every part has ended well.

    out: the folder for the archives. last: the folder with the archives of an earlier command, if there are any. Raises
    ConfigError if these were made with other flags.
    """
    deadline = time.monotonic() + 60 * minutes - PACKING_S
    cache = Path(os.environ.setdefault(CACHE, USUAL_CACHE))
    with TemporaryDirectory(prefix="sluice-results-") as name:
        folder = Path(name)
        unpack_results(last, folder)
        state = State.read(folder, device, models)
        if unpack_cache(last):
            print(f"the kernels of an earlier command are in {cache}", flush=True)
        try:
            well = Call(state, parts_for(call, models), deadline, out).run()
        finally:
            pack_results(folder, out)
            if cache.exists():
                print(pack_cache(cache, out), flush=True)
        print(f"All results: {PAGE} in {out / RESULTS}", flush=True)
    return 0 if well else 1
