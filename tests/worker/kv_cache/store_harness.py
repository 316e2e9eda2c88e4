"""Processes that share a K/V store: each an engine of its own, on a tiny checkpoint, without sockets."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.messages import Sampling
from tests.patience import PATIENCE_S
from tests.worker.models.harness import prompts_of
from tests.worker.scheduler.harness import commit
from worker.engine.build import load_engine
from worker.engine.kv_store import open_store
from worker.kv_cache.store import KvStore
from worker.model_runner import runner as runner_module
from worker.model_runner.sampler import sample_rows
from worker.scheduler.fetching import Fetching
from worker.scheduler.sequence import PrefixState, Row, Sequence

PAGE, BLOCK = 16, 2  # a file of the store has 32 tokens
PROMPT = 330  # tokens: ten blocks and a rest
NEW = 6


@dataclass
class Answer:
    ids: list[int]
    logits: list[Tensor]  # that each id was drawn from
    cached: int  # tokens of the prompt that were not computed

    def equals(self, other: "Answer") -> bool:
        same = len(self.logits) == len(other.logits) and all(map(torch.equal, self.logits, other.logits))
        return same and self.ids == other.ids


@dataclass
class Process:
    """An engine whose scheduler is stepped by hand. store: None without a folder"""

    checkpoint: Path
    monkeypatch: pytest.MonkeyPatch
    folders: tuple[Path, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)
    store: KvStore | None = None
    steps: int = 0
    _count: int = 0

    def __post_init__(self) -> None:
        options = {"dtype": "bfloat16", "kv_cache_gb": 0.02, "state_checkpoint_tokens": 64, **self.settings}
        worker = WorkerConfig(
            device="cpu", page_size=PAGE, prefill_chunk_size=64, max_step_tokens=128, max_batch_size=4,
            speculation="off", kv_store=" ".join(map(str, self.folders)), kv_store_fetch="always",
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        self.engine = load_engine(ModelConfig(model=str(self.checkpoint), max_seq_len=1024), worker)
        self.scheduler = self.engine.scheduler
        if self.folders:
            self.store = open_store(worker, self.engine, lambda: None, block=BLOCK)

    @property
    def fetching(self) -> Fetching:
        assert self.scheduler.state.paging.fetching is not None
        return self.scheduler.state.paging.fetching

    def sequence(self, prompt: list[int], salt: str = "", new: int = NEW, keep_s: int = 0) -> Sequence:
        self._count += 1
        sampling = Sampling(new, temperature=0.9, ignore_eos=True)
        return Sequence(
            (b"", self._count), list(prompt), len(prompt), sampling, 7, prefix=PrefixState(salt, keep_s=keep_s)
        )

    def answer(self, prompt: list[int], salt: str = "", new: int = NEW, keep_s: int = 0) -> Answer:
        """Computes an answer, and waits until what it leaves is written."""
        (found,) = self.answers([self.sequence(prompt, salt, new, keep_s)])
        self.settle()
        return found

    def answers(self, sequences: list[Sequence]) -> list[Answer]:
        """Runs until all sequences have ended. Returns their answers."""
        logits: dict[Sequence, list[Tensor]] = {sequence: [] for sequence in sequences}

        def sample(values: Tensor, rows: list[Row], *how: object) -> Tensor:
            for row, (sequence, *_) in zip(values, rows, strict=True):
                logits.setdefault(sequence, []).append(row.clone())
            return sample_rows(values, rows, *how)  # type: ignore[arg-type]

        with self.monkeypatch.context() as patch:
            patch.setattr(runner_module, "sample_rows", sample)
            for sequence in sequences:
                self.scheduler.submit(sequence, time.monotonic())
            self.run()
        return [Answer(one.tokens[one.prompt_len :], logits[one], one.prefix.cached_tokens) for one in sequences]

    def run(self, most: float = PATIENCE_S) -> None:
        until = time.monotonic() + most
        while self.scheduler.has_work:
            assert time.monotonic() < until, "it does not come to an end"
            self.step()

    def step(self) -> None:
        now = time.monotonic()
        plan = self.scheduler.plan(now)
        self.scheduler.check()
        if plan:
            self.steps += 1
            commit(self.scheduler, plan, self.engine.runner.step(plan).ids, now)
            self.scheduler.check()
        elif self.scheduler.next_wakeup(now) > now:
            time.sleep(0.001)

    def settle(self) -> None:
        """Waits until nothing is left to be written."""
        until = time.monotonic() + PATIENCE_S
        while self.store is not None and not self.store.is_settled:
            assert time.monotonic() < until, "the store does not come to rest"
            time.sleep(0.001)

    def forget(self) -> None:
        """Empties the prefix cache in memory, as if other prompts had taken all pages."""
        for pool in (*self.engine.pools, *([self.engine.slots] if self.engine.slots else [])):
            pool.forget_cached()

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def prompt_of(length: int = PROMPT, seed: int = 3) -> list[int]:
    return prompts_of([length], seed=seed)[0]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if path.is_file())
