"""The crash journal: which requests are blamed for a worker's death, and how two deaths find the culprit."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from shared import messages as m
from shared.heartbeat import Heartbeat, Phase
from shared.wire import pack_u32
from tests.wire.harness import expected
from tests.worker.engine.harness import ME, Bench, submit
from worker.engine.crash_journal import CrashJournal
from worker.engine.requests import QUARANTINE_CRASHES
from worker.scheduler.sequence import Chunk, RequestStats, Sequence


class Died(BaseException):
    """Kills a worker in these tests: nothing in the worker can catch it."""


def sequence(id: int, crashes: int = 0) -> Sequence:
    return Sequence((ME, id), [1], 1, m.Sampling(5), 0, history=RequestStats(crashes=crashes))


def death(heartbeat: Heartbeat, *, blamed: bool = True) -> CrashJournal:
    """Returns the journal of the next worker, after the previous worker died."""
    heartbeat.blamed = blamed
    return CrashJournal(heartbeat)


def test_crash_counts_against_requests_of_the_last_step_only(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "worker.heartbeat")
    crash_journal = CrashJournal(heartbeat)
    crash_journal.record_step([sequence(1), sequence(2)])
    crash_journal.record_step([sequence(2), sequence(3)])
    crash_journal = death(heartbeat)
    assert [crash_journal.crash_count((ME, id), 1) for id in (1, 2, 3)] == [0, 1, 1]
    assert crash_journal.crash_count((ME, 2), 0) == 0, "a new request inherits no crash"


def test_crash_counts_against_the_id_at_the_first_worker(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "worker.heartbeat")
    moved = sequence(1)
    moved.history.original_id = 99
    CrashJournal(heartbeat).record_step([moved])
    assert [death(heartbeat).crash_count((ME, id), 1) for id in (1, 99)] == [0, 1]


def test_crash_counts_persist_until_the_request_makes_progress(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "worker.heartbeat")
    crash_journal = CrashJournal(heartbeat)
    innocent, poison = sequence(1), sequence(2)
    crash_journal.record_step([innocent, poison])
    crash_journal = death(heartbeat)
    crash_journal = death(heartbeat)  # a death before any step, so it has another cause
    for one in (innocent, poison):
        one.history.crashes = crash_journal.crash_count(one.key, 1)
        assert one.history.crashes == 1
    crash_journal.record_step([innocent])
    crash_journal.clear(innocent)
    crash_journal.record_step([poison])
    crash_journal = death(heartbeat)
    assert [crash_journal.crash_count(one.key, 1) for one in (innocent, poison)] == [0, QUARANTINE_CRASHES]


def test_kill_from_outside_or_while_idle_counts_against_no_request(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "worker.heartbeat")
    crash_journal = CrashJournal(heartbeat)
    crash_journal.record_step([sequence(1)])
    crash_journal = death(heartbeat, blamed=False)
    assert crash_journal.crash_count((ME, 1), 20) == 0
    crash_journal.record_step([sequence(1)])
    crash_journal.record_idle()
    assert death(heartbeat).crash_count((ME, 1), 20) == 0


def test_crash_count_is_read_from_other_workers_files(tmp_path: Path) -> None:
    dead, other = Heartbeat(tmp_path / "worker-0.heartbeat"), CrashJournal(Heartbeat(tmp_path / "worker-1.heartbeat"))
    CrashJournal(dead).record_step([sequence(1)])
    assert other.crash_count((ME, 1), 1) == 0
    dead.blamed = True
    assert other.crash_count((ME, 1), 1) == 1


def test_crash_count_without_a_file_is_the_frontends() -> None:
    assert CrashJournal().crash_count((ME, 1), 2) == 2


def test_journal_of_many_sequences_stays_within_its_file(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "worker.heartbeat")
    CrashJournal(heartbeat).record_step([sequence(id) for id in range(5000)])
    crash_journal = death(heartbeat)
    assert crash_journal.crash_count((ME, 0), 1) == 1 and crash_journal.crash_count((ME, 4999), 1) == 0
    death(heartbeat)


class Lives:
    """Workers that die one after another while they serve the same streams, and the frontend of these streams."""

    def __init__(
        self, folder: Path, prompts: list[list[int]], count: int, check: Callable[[list[Chunk]], None]
    ) -> None:
        self.heartbeat = Heartbeat(folder / "worker.heartbeat")
        self.prompts, self.count, self.check = prompts, count, check
        self.outputs: dict[int, list[int]] = {id: [] for id in range(len(prompts))}
        self.ends: dict[int, m.End] = {}
        self.refused: dict[int, str] = {}
        self.crashes = 1  # as if all requests had been admitted before, because the bench's queue is short

    def live(self, turns: int) -> bool:
        """Runs one worker for some iterations. Returns True if its work killed it."""
        bench = Bench(self.check)
        bench.request_table.crash_journal = CrashJournal(self.heartbeat)
        self.heartbeat.phase = Phase.SERVING
        open = [id for id in self.outputs if id not in self.ends and id not in self.refused]
        bench.send(*(
            submit(id, self.prompts[id], self.count, generated=pack_u32(self.outputs[id]), crashes=self.crashes)
            for id in open
        ))  # fmt: skip
        self.heartbeat.blamed = False
        try:
            for _ in range(turns):
                bench.iterate()
                self._hear(bench)
        except Died:
            self.heartbeat.blamed = True
            self._hear(bench)
        self.crashes += 1
        return self.heartbeat.blamed

    def _hear(self, bench: Bench) -> None:
        for _, step in bench.server.sent:
            self.refused |= {one.id: one.message for one in step.rejected}
            self.ends |= {end.id: end for end in step.ends}
        for one in bench.request_table._records.values():
            id = one.sequence.key[1]
            output = one.sequence.tokens[len(self.prompts[id]) :]
            assert len(output) >= len(self.outputs[id])
            self.outputs[id] = output


@pytest.mark.parametrize("at", [0, 3])
def test_two_crashes_quarantine_the_culprit_and_all_others_finish(tmp_path: Path, at: int) -> None:
    def check(chunks: list[Chunk]) -> None:
        if any(chunk.sequence.key == (ME, 17) and chunk.sequence.output_len >= at for chunk in chunks):
            raise Died

    prompts = [[id + 1] * 9 for id in range(24)]
    lives = Lives(tmp_path, prompts, 8, check)
    assert [lives.live(60) for _ in range(3)] == [True, True, False]
    assert lives.refused == {17: "quarantined: in flight in 2 worker crashes"}
    for id, prompt in enumerate(prompts):
        assert lives.outputs[id] == (expected(prompt, at) if id == 17 else expected(prompt, 8))


def test_twenty_kills_from_outside_lose_no_request(tmp_path: Path) -> None:
    prompts = [[id + 1] * 40 for id in range(20)]
    lives = Lives(tmp_path, prompts, 40, lambda chunks: None)
    order = random.Random(1)
    for _ in range(20):
        assert not lives.live(order.choice((1, 2)))
    lives.live(60)
    assert not lives.refused
    assert lives.outputs == {id: expected(prompt, 40) for id, prompt in enumerate(prompts)}
