"""A compute loop over an encoder: whole texts, aborts, the failure of one text, and memory that does not suffice."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from shared import messages as m
from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.wire import pack_u32
from tests import encoders
from tests.worker.engine.harness import ME, Bench
from worker.checkpoint.checkpoint import CheckpointError
from worker.engine.build import Engine, load_engine

MEAN = m.Pooling(m.PoolingKind.MEAN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.encoder(tmp_path_factory.mktemp("served") / "model", most=32)


@cache
def engine_of(folder: Path) -> Engine:
    return load_engine(ModelConfig(model=str(folder)), WorkerConfig(device="cpu", max_batch_size=4, max_step_tokens=40))


class EncoderBench(Bench):
    """A loop over an encoder with room for four texts, or 40 tokens, in a step."""

    def __init__(self, folder: Path) -> None:
        engine = engine_of(folder)
        config, pools = engine.scheduler.config, engine.size.pools()
        super().__init__(runner=engine.runner, config=config, pools=pools, vocab_size=encoders.VOCAB)
        self.request_table._task = engine.task

    def vectors(self) -> dict[int, bytes]:
        """Returns the vectors that were sent, by request."""
        return {one.id: one.values for topic, step in self.server.sent if topic == ME for one in step.pooled}


def submit(id: int, ids: list[int], pooling: m.Pooling = MEAN, **more: int) -> m.Submit:
    return m.Submit(id, pack_u32(ids), m.Sampling(0), pooling=pooling, **more)  # type: ignore[arg-type]


def text(length: int, seed: int = 0) -> list[int]:
    return [(7 * seed + 3 * i) % 90 + 5 for i in range(length)]


def test_texts_run_whole_in_few_steps_and_have_the_bits_of_a_step_alone(folder: Path) -> None:
    bench = EncoderBench(folder)
    sent = {id: text(1 + 5 * id % 32, id) for id in range(1, 25)}
    bench.send(*(submit(id, ids) for id, ids in sent.items()))
    bench.iterate(12)
    together, ends = bench.vectors(), bench.received()[1]
    assert {end.outcome for end in ends.values()} == {
        m.Outcome.POOLED
    } and together.keys() == ends.keys() == sent.keys()
    alone = EncoderBench(folder)
    for id, ids in sent.items():
        alone.send(submit(id, ids))
        alone.iterate()
    assert alone.vectors() == together
    assert abs(np.linalg.norm(np.frombuffer(together[3], "<f4")) - 1) < 1e-6


def test_text_beyond_the_limit_and_odd_pairs_are_refused(folder: Path) -> None:
    bench = EncoderBench(folder)
    bench.send(submit(1, text(33)), submit(2, text(5), second_from=5), submit(3, text(5), second_from=3))
    bench.iterate(2)
    rejected = {one.id: one.reason for _, step in bench.server.sent for one in step.rejected}
    assert rejected == {1: m.Refusal.TOO_LONG, 2: m.Refusal.INVALID} and bench.vectors().keys() == {3}


def test_abort_and_deadline_end_a_text_that_waits(folder: Path) -> None:
    bench = EncoderBench(folder)
    bench.send(*(submit(id, text(9, id)) for id in range(1, 8)), submit(8, text(9), deadline_ms=1), m.Abort((7,)))
    bench.iterate(4)
    ends = {id: end.outcome for id, end in bench.received()[1].items()}
    assert ends[7] is m.Outcome.ABORTED and bench.vectors().keys() >= {1, 2, 3, 4, 5, 6}
    assert ends[8] in (m.Outcome.DEADLINE, m.Outcome.POOLED) and len(ends) == 8


def test_text_that_fails_fails_alone_and_is_never_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EncoderBench(folder)
    launch, steps = bench.runner.launch, list[list[int]]()

    def failing(plan: object, before: object = None) -> object:
        lengths = [chunk.length for chunk in plan.chunks]  # type: ignore[attr-defined]
        steps.append(lengths)
        if 13 in lengths:
            raise MemoryError("too large")
        return launch(plan, before)

    monkeypatch.setattr(bench.runner, "launch", failing)
    bench.send(submit(1, text(5)), submit(2, text(13)), submit(3, text(6)))
    bench.iterate(4)
    ends = {id: end.outcome for id, end in bench.received()[1].items()}
    assert ends == {1: m.Outcome.POOLED, 2: m.Outcome.ERROR, 3: m.Outcome.POOLED}
    assert {length for lengths in steps for length in lengths} <= {5, 13, 6, 1}, "a half of 13 was computed"


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "deberta"}, "model_type 'deberta' is not supported"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supported"),
    ({"is_decoder": True}, "is_decoder True is not supported"),
    ({"hidden_act": "mish"}, "activation 'mish' is not supported"),
    ({"type_vocab_size": -1}, "type_vocab_size -1 is not supported"),
])  # fmt: skip
def test_unknown_encoder_or_setting_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    folder = encoders.encoder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_engine(ModelConfig(model=str(folder)), WorkerConfig(device="cpu"))


def test_flags_that_do_not_fit_an_encoder_are_refused_by_name(folder: Path) -> None:
    model = ModelConfig(model=str(folder))
    with pytest.raises(ConfigError, match="--lora-modules"):
        load_engine(ModelConfig(model=str(folder), lora_modules="a=b"), WorkerConfig(device="cpu"))
    with pytest.raises(ConfigError, match="--max-seq-len 41 is more than the model's 40"):
        load_engine(ModelConfig(model=str(folder), max_seq_len=41), WorkerConfig(device="cpu"))
    with pytest.raises(CheckpointError, match="--task generate"):
        load_engine(ModelConfig(model=str(folder), task="generate"), WorkerConfig(device="cpu"))
    assert engine_of(folder).limits.max_seq_len == 32 and load_engine(model, WorkerConfig(device="cpu")).task.encoder
