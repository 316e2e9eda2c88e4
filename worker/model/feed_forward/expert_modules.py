"""Finds the modules of a layer's experts and router in a checkpoint. Checkpoints name these modules in several ways."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from worker.model.checkpoint.stacked_linear import StackedLinear
from worker.spec import ExpertsSpec


@dataclass(frozen=True, slots=True)
class Spelling:
    """The names of the modules in one kind of checkpoint, with {} for the number of the expert.

    gate_up: the names of gate and up, or one name if both are one linear
    interleaved: if true, rows of gate and up alternate, and plain numbers are stored as [inputs, outputs] (gpt-oss)
    """

    router: str
    gate_up: tuple[str, ...]
    down: str
    interleaved: bool = False
    choice_bias: str = "mlp.gate.e_score_correction_bias"  # the name of a tensor, not of a module

    @property
    def of_first(self) -> list[str]:
        """The names of the modules of the router and of the first expert."""
        return [self.router, *(module.format(0) for module in (*self.gate_up, self.down))]


_DOWN, _FUSED = "mlp.experts.{}.down_proj", ("mlp.experts.{}.gate_up_proj",)
_MIXTRAL = "block_sparse_moe.experts.{}."
_LFM2 = "feed_forward.experts.{}."
_GRANITE = "block_sparse_moe.{}put_linear.{{}}"
SPELLINGS = (
    Spelling("mlp.gate", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), _DOWN),  # Qwen, and all GGUF files
    Spelling(
        "block_sparse_moe.gate", (_MIXTRAL + "w1", _MIXTRAL + "w3"), _MIXTRAL + "w2",
        choice_bias="block_sparse_moe.e_score_correction_bias",
    ),
    Spelling("feed_forward.gate", (_LFM2 + "w1", _LFM2 + "w3"), _LFM2 + "w2", choice_bias="feed_forward.expert_bias"),
    Spelling("block_sparse_moe.router.layer", (_GRANITE.format("in"),), _GRANITE.format("out")),
    Spelling("mlp.router", _FUSED, _DOWN, interleaved=True),  # gpt-oss
    Spelling("mlp.gate", _FUSED, _DOWN),  # the names that transformers 5 has in memory and may save
    Spelling("router.proj", ("experts.{}.gate_up_proj",), "experts.{}.down_proj"),  # Gemma 4
    Spelling("router.proj", ("experts.{}.gate_proj", "experts.{}.up_proj"), "experts.{}.down_proj"),
)  # fmt: skip


def spelling(modules: Collection[str]) -> Spelling:
    """Returns how a checkpoint names its experts: the spelling with the most names that are in `modules`.

    modules: the names of the modules in the checkpoint's layers. Only the router and the first expert are looked up.
    """
    return max(SPELLINGS, key=lambda one: sum(module in modules for module in one.of_first))


def router_linear(spec: ExpertsSpec, hidden: int, names: Spelling) -> StackedLinear:
    return StackedLinear((names.router,), (spec.count,), hidden, spec.router_bias, exact=True)


def expert_linears(spec: ExpertsSpec, hidden: int, names: Spelling) -> tuple[list[StackedLinear], list[StackedLinear]]:
    """Returns two lists with an entry for each expert: the stacked gate and up, and the down projection."""
    inner = spec.intermediate_size
    rows = (2 * inner // len(names.gate_up),) * len(names.gate_up)
    order = torch.arange(2 * inner).view(inner, 2).T.flatten() if names.interleaved else None
    transposed = None if spec.transposed and names.gate_up == _FUSED else names.interleaved
    gate_up, down = [], []
    for expert in range(spec.count):
        both = tuple(module.format(expert) for module in names.gate_up)
        gate_up.append(StackedLinear(both, rows, hidden, spec.bias, order, transposed))
        module = (names.down.format(expert),)
        down.append(StackedLinear(module, (hidden,), inner, spec.bias, transposed=transposed))
    return gate_up, down
