"""What a rank on a GPU does with an exchange that ended or differs, and which part of a weight it multiplies."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.config.declaration import ConfigError
from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.models.harness import CPU, cache_for, pack, prompts_of, rows_for
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.checkpoint.checkpoint import read_config
from worker.distributed.checks import RankDiffers
from worker.distributed.leader import Leader
from worker.distributed.messages import Free
from worker.distributed.nccl import GatheringDecoder, ShardGroup, gathering, rehearsing
from worker.engine.build import _settings_on
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder
from worker.models.load import load
from worker.models.sharding import Part, Share
from worker.operations import TORCH
from worker.ops.exchange import RankLost
from worker.ops.linear.packed import PackedLinear


def no_store() -> Any:
    raise RuntimeError("no such file")


def test_ranks_that_do_not_find_each_other_are_lost() -> None:
    shards = ShardGroup(1, 2, no_store, CPU)
    with pytest.raises(RankLost, match="the ranks of a stage do not find each other: no such file"):
        shards.join()


def test_nothing_is_used_that_was_computed_when_the_exchange_ended() -> None:
    shards = ShardGroup(0, 2, no_store, CPU)
    shards.settle()
    shards.end()
    assert shards.lost
    with pytest.raises(RankLost, match="has died"):
        shards.settle()


class Repeating:
    """A ShardGroup without others: the columns of this rank stand in for those of both.

    wrong: changes what rank 1 gives
    """

    rank, count = 0, 2

    def __init__(self) -> None:
        self.wrong = 0

    def gather(self, own: Tensor) -> Tensor:
        return torch.cat((own, own + self.wrong), dim=1)

    def settle(self) -> None:
        pass


def test_rank_that_differs_is_named(checkpoints: Checkpoints) -> None:
    folder, share, shards = checkpoints("llama"), Share(0, 2), Repeating()
    spec = spec_from_config(read_config(folder))
    decoder = Decoder(share.spec(spec), load(folder, spec, torch.float32, CPU, invariant=True, share=share), 512, TORCH)
    given: Any = shards
    part = GatheringDecoder(decoder, cache_for(decoder, tokens=64), given, first=4)
    (row,) = rows_for(part._cache, prompts_of([9]), 0)
    inputs = pack([(row, 9)], 16)
    with torch.inference_mode():
        assert part.logits(part.hidden(inputs, checked=True)).shape == (1, spec.vocab_size)
        shards.wrong = 1
        with pytest.raises(RankDiffers, match="rank 5 has another residual stream than most ranks"):
            part.hidden(inputs, checked=True)


def test_shared_expert_is_added_in_the_columns_of_a_rank() -> None:
    def experts(h: Tensor, *, add: Tensor, gather: Any) -> Tensor:
        return gather(h) * 10 + add

    exchange = gathering(1, 2, lambda own: own)
    plain: Any = SimpleNamespace(**{name: None for name in TORCH.__slots__} | {"experts": experts})
    found = exchange(plain).experts(torch.ones(1, 2), add=torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert found.tolist() == [[13.0, 14.0]]
    assert rehearsing(3)(plain).all_columns(torch.tensor([[1.0, 2.0]])).tolist() == [[1.0, 2.0] * 3]


@needs_library
@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "gpt-oss", "qwen2-moe"])
def test_linears_of_a_rank_know_how_many_rows_the_whole_weight_has(checkpoints: Checkpoints, kind: str) -> None:
    folder = checkpoints(kind)
    spec = spec_from_config(read_config(folder))
    whole, part = (
        load(folder, spec, torch.bfloat16, CPU, invariant=True, share=share) for share in (None, Share(1, 2))
    )
    pairs = [(whole.head, part.head)]
    for all_rows, own in zip(whole.layers, part.layers, strict=True):
        pairs += [pair for pair in zip(all_rows.linears, own.linears, strict=True) if isinstance(pair[0], PackedLinear)]  # type: ignore[misc]
    for one, own in pairs:
        assert one.cpu is not None and own.cpu is not None and not one.whole_rows
        assert own.whole_rows == one.cpu.n and own.cpu.n in (one.cpu.n, one.cpu.n // 2)


def test_ranks_on_gpus_neither_overlap_steps_nor_capture_graphs() -> None:
    cuda = torch.device("cuda")
    asked = WorkerConfig(gpu_options="pdl")
    alone, ranks = (_settings_on(cuda, replace(asked, tensor_parallel_size=size)) for size in (1, 2))
    assert (alone.overlap, alone.cuda_graphs, alone.gpu_options) == (True, True, "pdl")
    assert (ranks.overlap, ranks.cuda_graphs, ranks.gpu_options) == (False, False, "")


def leader_of(checkpoints: Checkpoints, others: list[Free]) -> Any:
    """Returns a leader that has ranks with these answers."""
    spec = spec_from_config(read_config(checkpoints("llama")))
    parts = [Part(rank, 2, (0, len(spec.layers))) for rank in range(2)]
    answers: Any = dict(zip(parts[1:], others, strict=True))
    return SimpleNamespace(
        part=parts[0], _stored=SimpleNamespace(spec=spec), _free_of_others=lambda on_progress: answers
    )


def test_the_rank_with_the_least_room_decides(checkpoints: Checkpoints) -> None:
    leader = leader_of(checkpoints, [Free(1000, "triton", False)])
    agreed = Leader.agree(leader, Free(3000, "triton", True), lambda: None)
    assert agreed == Free(2000, "triton", False), "1000 bytes on each of two ranks, of which one does not keep bits"


def test_ranks_with_other_kernels_are_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="rank 1 computes with other kernels than rank 0"):
        Leader.agree(leader_of(checkpoints, [Free(1000, "torch")]), Free(3000, "triton"), lambda: None)
