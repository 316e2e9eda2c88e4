"""Adapters are read, kept and evicted, and their requests wait, run or are refused."""

import itertools
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import messages as m
from shared.config.settings import ModelConfig
from shared.lora import AdapterError, read_files
from shared.prefix_identity import PrefixIdentity
from shared.wire import pack_u32
from tests.adapters import draw_adapter
from tests.checkpoints import Checkpoints
from tests.patience import PATIENCE_S
from tests.worker.lora.harness import decoder_of
from tests.worker.model_runner.harness import RunnerBench
from worker.lora.store import MAX_COUNTED, OTHERS, AdapterCollector, AdapterStore
from worker.scheduler.sequence import AdapterUse, Sequence

PROMPT = list(range(40, 60))


class Bench(RunnerBench):
    """A compute loop with a store of adapters, which lie in `folder` as a0, a1 …"""

    def __init__(self, base: Path, folder: Path, *, most: int = 3, max_rank: int = 16) -> None:
        self.folder = folder
        decoder = decoder_of(base)
        super().__init__(decoder)
        model = ModelConfig(model=str(base), allow_runtime_lora=str(folder))
        self.store = AdapterStore(base, decoder.spec, decoder.weights, model, most=most, max_rank=max_rank)
        self.request_table._adapters = self.store

    def adapter(self, name: str) -> m.Adapter:
        path = str(self.folder / name)
        return m.Adapter(name, path, read_files(path).sha256)

    def ask(self, id: int, adapter: m.Adapter | None, new: int = 8, **options: object) -> None:
        salt = PrefixIdentity(adapter=adapter).text
        sampling = m.Sampling(new, temperature=0.0, ignore_eos=True)
        self.send(m.Submit(id, pack_u32(PROMPT), sampling, cache_salt=salt, adapter=adapter, **options))  # type: ignore[arg-type]

    def told(self) -> dict[int, list[int] | str]:
        """Runs iterations until all requests have ended. Returns the ids or the refusal of each request."""
        self.drain()
        rejected = {one.id: one.message for _, step in self.server.sent for one in step.rejected}
        outputs, ends = self.received()
        return rejected | {id: outputs.get(id, end.error) for id, end in ends.items()}


@pytest.fixture
def bench(checkpoints: Checkpoints, tmp_path: Path) -> Iterator[Bench]:
    base = checkpoints("qwen3")
    for index in range(5):
        draw_adapter(base, tmp_path / f"a{index}", index, r=16 if index < 4 else 17)
    bench = Bench(base, tmp_path)
    yield bench
    bench.store.close()


def test_requests_with_adapters_wait_for_them_and_others_do_not(bench: Bench) -> None:
    for id in range(3):
        bench.ask(id, bench.adapter(f"a{id}"))
    bench.ask(3, None)
    bench.ask(4, bench.adapter("a0"))
    bench.iterate()
    assert [sequence.key[1] for sequence in bench.scheduler.sequences()] == [3], "the loop reads no adapter"
    told = bench.told()
    assert told[0] == told[4] and len({str(told[id]) for id in range(4)}) == 4
    assert all(len(ids) == 8 for ids in told.values())


def test_adapter_that_was_evicted_is_read_again_and_one_in_use_stays(bench: Bench) -> None:
    for id in range(4):
        bench.ask(id, bench.adapter(f"a{id}"))
        first = bench.told()
        assert len(bench.store) == min(3, id + 1)
    bench.ask(4, bench.adapter("a0"))
    assert bench.told()[4] == first[0]
    for id in range(5, 8):
        bench.ask(id, bench.adapter(f"a{id - 5}"), 60)
    bench.iterate(3)
    bench.ask(8, bench.adapter("a3"))
    assert bench.told()[8] == first[3], "it waits for those that end"


def test_more_adapters_than_fit_wait_their_turn_and_none_waits_for_ever(bench: Bench, tmp_path: Path) -> None:
    for index in range(5, 8):
        shutil.copytree(tmp_path / f"a{index - 5}", tmp_path / f"a{index}")
    names = [f"a{index}" for index in (0, 1, 2, 3, 5, 6, 7)]
    for id, name in enumerate(names):
        bench.ask(id, bench.adapter(name))
    bench.iterate()
    assert len(bench.request_table._preparing) == 7
    told = bench.told()
    assert all(len(told[id]) == 8 for id in range(7)) and len(bench.store) == 3
    assert [told[id] for id in (4, 5, 6)] == [told[0], told[1], told[2]], "these have the same weights"
    busy = {name: 10 + place for place, name in enumerate(("a0", "a1", "a2"))}  # name → the newest request for it
    for name, id in busy.items():
        bench.ask(id, bench.adapter(name), 30)
    asked = itertools.count(101)

    def iterate() -> None:
        """Each of the three is asked for again before its newest request has ended."""
        for name, id in busy.items():
            if len(bench.received()[0].get(id, ())) > 20:
                busy[name] = again = next(asked)
                bench.ask(again, bench.adapter(name), 30)
        bench.iterate()

    deadline = time.monotonic() + PATIENCE_S
    while len({one.key[1] for one in bench.scheduler.sequences()} & {*busy.values()}) < 3:
        assert time.monotonic() < deadline, "the three never run together"
        iterate()
    bench.ask(20, bench.adapter("a3"))
    while 20 not in bench.received()[1]:
        assert time.monotonic() < deadline, "it never ran"
        iterate()
    waits = bench.request_table._preparing
    assert waits or bench.scheduler.has_work, "it ran while the others were still asked for"
    assert all(len(ids) >= 8 for ids in bench.told().values())


def test_request_that_waits_for_room_can_be_aborted_and_has_a_deadline(bench: Bench) -> None:
    for id in range(3):
        bench.ask(id, bench.adapter(f"a{id}"), 60)
    bench.ask(3, bench.adapter("a3"), deadline_ms=1)
    bench.ask(4, bench.adapter("a3"))
    bench.ask(5, bench.adapter("a3"))
    bench.iterate(3)
    bench.send(m.Abort((4,)))
    told, ends = bench.told(), bench.received()[1]
    assert (ends[3].outcome, ends[4].outcome) == (m.Outcome.DEADLINE, m.Outcome.ABORTED)
    assert all(len(told[id]) == 60 for id in range(3)) and len(told[5]) == 8


def test_requests_for_adapters_that_cannot_be_used_are_refused_with_their_names(bench: Bench, tmp_path: Path) -> None:
    bench.ask(0, bench.adapter("a4"))
    bench.ask(1, m.Adapter("gone", str(tmp_path / "gone"), "0" * 64))
    bench.ask(2, m.Adapter("passwords", "/etc", "0" * 64))
    bench.told()
    changed = bench.adapter("a1")
    shutil.copy(tmp_path / "a2/adapter_model.safetensors", tmp_path / "a1")
    bench.ask(3, changed)
    told = bench.told()
    reasons = ("'a4'.*--max-lora-rank 16", "'gone'.*not a folder", "'passwords'.*not below", "'a1'.*have changed")
    for id, words in enumerate(reasons):
        assert re.search(words, str(told[id])), told[id]
    shutil.copytree(tmp_path / "a0", tmp_path / "gone")
    bench.ask(4, bench.adapter("gone"))
    assert len(bench.told()[4]) == 8, "what failed is tried again"


def test_hostile_or_late_requests_do_no_harm(bench: Bench) -> None:
    adapter = bench.adapter("a0")
    sampling = m.Sampling(3)
    odd = [
        m.Submit(1, pack_u32(PROMPT), sampling, adapter=adapter),
        m.Submit(2, pack_u32(PROMPT), sampling, cache_salt="lora:\x00"),
        m.Submit(3, pack_u32(PROMPT), sampling, adapter=m.Adapter("n" * 5000, "/", "0" * 64)),
        m.Submit(4, pack_u32(PROMPT), sampling, adapter=m.Adapter("n", "/", "0")),
    ]  # fmt: skip
    bench.send(*odd)
    bench.ask(5, adapter)
    bench.send(m.Abort((5,)))
    bench.ask(6, adapter, deadline_ms=1)
    bench.iterate(2)
    told = bench.told()
    assert all("adapter" in str(told[id]) for id in range(1, 5)), told
    assert bench.received()[1][5].outcome is m.Outcome.ABORTED
    assert bench.received()[1][6].outcome is m.Outcome.DEADLINE
    bench.request_table._adapters = None
    bench.ask(7, adapter)
    assert bench.told()[7] == "`model`: this worker was started without adapters"


def test_adapter_is_freed_when_its_request_ends(bench: Bench) -> None:
    bench.ask(0, bench.adapter("a0"))
    while not bench.scheduler.sequences():
        bench.iterate()
    sequence = bench.scheduler.sequences()[0]
    assert sequence.adapter is not None and sequence.adapter.loaded is not None
    bench.told()
    assert sequence.adapter is None, "a request that is kept for late questions keeps no weights"


def test_metrics_name_running_and_waiting_adapters_and_few_counters(bench: Bench) -> None:
    for id, name in enumerate(("a0", "a1")):
        bench.store.load(bench.adapter(name), list).result()  # else the first may end before the second is read
        bench.ask(id, bench.adapter(name), 50)
    deadline = time.monotonic() + PATIENCE_S
    while len(bench.scheduler.state.running) < 2:
        assert time.monotonic() < deadline, "the two never run together"
        bench.iterate()
    collector = AdapterCollector("x_", bench.store, bench.scheduler)
    info, counter, kept = collector.collect()
    assert info.samples[0].labels == {
        "max_lora": "8", "running_lora_adapters": "a0,a1", "waiting_lora_adapters": "",
    } and info.name == "x_lora_requests_info"  # fmt: skip
    assert {(one.labels["lora_name"], one.value) for one in counter.samples} == {("a0", 1.0), ("a1", 1.0)}
    assert kept.samples[0].value == 2.0
    for index in range(2 * MAX_COUNTED):
        bench.store.count(f"many{index}")
    assert len(bench.store.requests) == MAX_COUNTED + 1 and bench.store.requests[OTHERS] == MAX_COUNTED + 2
    bench.told()


def test_full_store_and_failed_reads_raise_for_the_caller(bench: Bench) -> None:
    used = Sequence((b"f", 1), [1], 1, m.Sampling(1), 0)
    for name in ("a0", "a1", "a2"):
        bench.store.load(bench.adapter(name), list).result()
    used.adapter = AdapterUse(bench.adapter("a0"))
    assert bench.store.load(bench.adapter("a3"), lambda: [used]).result().sha256 == bench.adapter("a3").sha256
    others = [Sequence((b"f", 1), [1], 1, m.Sampling(1), 0) for _ in range(3)]
    for name, sequence in zip(("a0", "a2", "a3"), others, strict=True):
        sequence.adapter = AdapterUse(bench.adapter(name))
    assert bench.store.load(bench.adapter("a1"), lambda: others) is None, "all are in use"
    assert bench.store.load(bench.adapter("a0"), lambda: others, behind=1) is None, "the oldest makes room"
    assert bench.store.load(bench.adapter("a2"), lambda: others, behind=1) is not None
    with pytest.raises(AdapterError):
        bench.store.load(bench.adapter("a4"), list).result()
