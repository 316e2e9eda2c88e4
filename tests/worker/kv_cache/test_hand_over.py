"""Two processes: one computes prompts, the other generates from what the store has. The bits are those of one."""

import threading
import time
from pathlib import Path

import pytest

from shared.messages import Prefill
from tests.checkpoints import Checkpoints
from tests.patience import PATIENCE_S
from tests.worker.kv_cache.store_harness import BLOCK, PAGE, PROMPT, Process, prompt_of
from tests.worker.kv_cache.test_store import Held, with_disk
from worker.engine.kv_store import HandOver
from worker.scheduler.sequence import Sequence

BLOCKS = (PROMPT - 1) // (PAGE * BLOCK) * PAGE * BLOCK  # tokens that whole files have
PAGES = (PROMPT - 1) // PAGE * PAGE  # tokens up to the last state


def prefill(process: Process, prompt: list[int]) -> Sequence:
    """Computes a prompt for another process, without waiting for its files."""
    sequence = process.sequence(prompt, new=0)
    sequence.history.prefill = Prefill.ONLY
    process.scheduler.submit(sequence, time.monotonic())
    process.run()
    assert sequence.output_len == 0 and sequence.computed_tokens == len(prompt)
    return sequence


def handed_over(process: Process, prompt: list[int]) -> None:
    """Computes a prompt for another process, and waits as a worker does."""
    assert process.store is not None
    over, until = HandOver(process.store), time.monotonic() + PATIENCE_S
    sequence = prefill(process, prompt)
    over.begin(sequence, 0.0)
    while not (done := over.take(0.0)):
        assert time.monotonic() < until, "the files are not written"
        time.sleep(0.001)
    assert done == [sequence] and not over.take(9.9)


@pytest.mark.parametrize(
    ("kind", "settings", "found"),
    [
        ("llama", {}, BLOCKS), ("llama", {"kv_cache_dtype": "int8"}, BLOCKS),
        ("llama", {"kv_cache_dtype": "int4"}, BLOCKS), ("gemma3", {}, BLOCKS),
        ("mistral", {}, BLOCKS), ("qwen3_5", {}, PAGES),
    ],
)  # fmt: skip
def test_answer_has_the_bits_of_one_worker(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, object],
    found: int,
) -> None:  # fmt: skip
    alone = Process(checkpoints(kind), monkeypatch, (), settings).answer(prompt_of())
    computing, generating = (Process(checkpoints(kind), monkeypatch, (tmp_path / "kv",), settings) for _ in range(2))
    handed_over(computing, prompt_of())
    sequence = generating.sequence(prompt_of())
    sequence.history.prefill = Prefill.DONE
    (answer,) = generating.answers([sequence])
    assert answer.equals(alone) and answer.cached == found
    handed_over(computing, prompt_of())  # again, from memory
    assert computing.store is not None
    (tier,) = computing.store.tiers
    assert tier.counts.nbytes * computing.store.most_tokens <= tier.limit * PROMPT, "the room is not overestimated"
    for process in (computing, generating):
        process.close()


def test_files_that_are_not_written_yet_are_waited_for(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(checkpoints("llama"), monkeypatch, (tmp_path / "kv", tmp_path / "slow"))
    gates = [threading.Event(), threading.Event()]
    assert process.store is not None
    process.settle()
    for writer, gate in zip(process.store._writers, gates, strict=True):
        writer.do(lambda gate=gate: gate.wait(PATIENCE_S))  # type: ignore[misc]
    over = HandOver(process.store)
    over.begin(prefill(process, prompt_of()), 0.0)
    time.sleep(0.01)
    assert not over.take(0.0)
    gates[1].set()  # one folder suffices
    until = time.monotonic() + PATIENCE_S
    while not over.take(0.0):
        assert time.monotonic() < until
        time.sleep(0.001)
    gates[0].set()


def test_unusable_store_is_not_waited_for(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(checkpoints("llama"), monkeypatch, (tmp_path / "kv",))
    assert process.store is not None
    process.settle()
    process.store.tiers[0]._paused_until = time.monotonic() + PATIENCE_S
    over = HandOver(process.store)
    over.begin(prefill(process, prompt_of()), 0.0)
    assert len(over.take(0.0)) == 1


def test_what_was_handed_over_waits_until_a_thread_can_read_it(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing, generating = (Process(checkpoints("llama"), monkeypatch, (tmp_path / "kv",)) for _ in range(2))
    prompts = [prompt_of(seed=seed) for seed in range(4)]  # one more than threads that read
    for prompt in prompts:
        handed_over(computing, prompt)
    disk = Held()
    process = with_disk(generating, disk)
    sequences = [process.sequence(prompt) for prompt in prompts]
    for sequence in sequences:
        sequence.history.prefill = Prefill.DONE
        process.scheduler.submit(sequence, time.monotonic())
    for _ in range(4):
        process.step()
    assert process.fetching.waiting == 4 and process.steps == 0
    disk.let.release(1000)
    process.run()
    assert [one.prefix.cached_tokens for one in sequences] == [BLOCKS] * 4
