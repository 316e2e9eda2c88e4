"""Drafters that run a model, beside a model that several processes compute: the drafts and answers of one process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared import messages as m
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.wire import pack_u32
from tests.checkpoints import VOCAB, Checkpoints
from tests.worker.distributed.test_steps_in_stages import StagedBench, served
from tests.worker.ops.harness.cpu_tiers import needs_library
from tests.worker.spec_decode.eagle_heads import EAGLES, Eagle
from tests.worker.spec_decode.heads import with_head
from worker.engine.build import Engine, load_engine
from worker.spec_decode.head_drafter import HeadDrafter

pytestmark = needs_library
COUNT, TOKENS = 5, 24
SEVERAL = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}]


class Drafted:
    """Model and drafter of each method, and how often engines of them propose what."""

    def __init__(self, checkpoints: Checkpoints, folder: Path) -> None:
        with_head("qwen3_5", checkpoints("qwen3_5"), folder / "mtp")
        self.served = {
            "mtp": folder / "mtp", "recurrent": folder / "mtp", "whole-vocabulary": checkpoints("qwen3"),
            "draft_model": checkpoints("qwen3"),
        }  # fmt: skip
        self.config: dict[str, dict[str, Any]] = {
            "mtp": {"method": "mtp"}, "draft_model": {"method": "draft_model", "model": str(checkpoints("qwen3"))},
        }  # fmt: skip
        for name in ("recurrent", "whole-vocabulary"):
            eagle = Eagle(EAGLES[name], checkpoints(EAGLES[name].served)).save(folder / name)
            self.config[name] = {"method": "eagle3", "model": str(eagle)}

    def engine(self, name: str, **several: int) -> Engine:
        stated = json.dumps({**self.config[name], "num_speculative_tokens": 3})
        worker = WorkerConfig(
            device="cpu", dtype="float32", kv_cache_gb=0.02, page_size=16, threads=2, speculation="ngram",
            max_draft_tokens=3, speculative_config=stated, **several,  # type: ignore[arg-type]
        )  # fmt: skip
        return load_engine(ModelConfig(model=str(self.served[name]), max_seq_len=128), worker)


@pytest.fixture(scope="module")
def drafted(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafted]:
    yield Drafted(checkpoints, tmp_path_factory.mktemp("drafted"))


def answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, Any], dict[tuple[Any, int], Any]]:
    """Returns the answers, and the drafts by sequence and by how many tokens it had."""
    speculation = engine.scheduler.speculation
    assert speculation is not None and speculation.proposer is not None
    proposer, drafts = speculation.proposer, dict[tuple[Any, int], Any]()
    plain = proposer.propose

    def noted(wanted: Any) -> Any:
        found = plain(wanted)
        drafts.update({(one.key, len(one.tokens)): ids for (one, _), ids in zip(wanted, found, strict=True) if ids})
        return found

    monkeypatch.setattr(proposer, "propose", noted)
    bench = StagedBench(engine)
    assert bench.scheduler.speculation is not None
    bench.scheduler.speculation.proposer = proposer
    requests = [
        m.Submit(id, pack_u32([(7 * id + 3 * at) % (VOCAB - 3) + 3 for at in range(9 + 11 * id)]),
                 m.Sampling(TOKENS, temperature=0.8 if id % 2 else 0.0, seed=id, ignore_eos=True))
        for id in range(COUNT)
    ]  # fmt: skip
    return served(bench, requests), drafts


@pytest.mark.parametrize("several", SEVERAL)
@pytest.mark.parametrize("name", ["mtp", "recurrent", "whole-vocabulary", "draft_model"])
def test_drafts_and_answers_are_those_of_one_process(
    drafted: Drafted, monkeypatch: pytest.MonkeyPatch, name: str, several: dict[str, int]
) -> None:
    expected, drafts = answers(drafted.engine(name), monkeypatch)
    found, others = answers(drafted.engine(name, **several), monkeypatch)
    assert found == expected
    both = drafts.keys() & others.keys()  # how many tokens are drafted, and when, depends on times
    assert both and all(a == b for key in both for a, b in zip(drafts[key], others[key], strict=False))


def test_a_rank_with_a_part_of_the_output_head_drafts_from_all_tokens(drafted: Drafted) -> None:
    heads = []
    for several in ({}, {"tensor_parallel_size": 2}):
        engine = drafted.engine("whole-vocabulary", **several)
        assert engine.scheduler.speculation is not None
        drafter = engine.scheduler.speculation.proposer
        assert isinstance(drafter, HeadDrafter)
        heads.append(drafter.head.decoder)
    h = torch.randn(3, heads[0].spec.hidden_size)
    assert torch.equal(heads[0].logits(h), heads[1].logits(h)) and heads[1].logits(h).shape == (3, VOCAB)
