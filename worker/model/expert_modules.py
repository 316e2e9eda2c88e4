"""Which modules of a checkpoint the experts of a layer consist of, in the spellings that checkpoints use."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.model.spec import ExpertsSpec
from worker.model.stacked_linear import StackedLinear
from worker.model.stored_weight import PlainWeight


@dataclass(frozen=True, slots=True)
class Spelling:
    """The names of the modules, with {} for the number of the expert.

    interleaved: whether rows of gate and up alternate, and plain numbers are stored as [inputs, outputs] (gpt-oss).
    """

    router: str
    gate_up: tuple[str, ...]
    down: str
    interleaved: bool = False

    @property
    def of_first(self) -> list[str]:
        """The modules of the router and of the first expert."""
        return [self.router, *(module.format(0) for module in (*self.gate_up, self.down))]


_DOWN, _FUSED = "mlp.experts.{}.down_proj", ("mlp.experts.{}.gate_up_proj",)
_MIXTRAL = "block_sparse_moe.experts.{}."
_GRANITE = "block_sparse_moe.{}put_linear.{{}}"
SPELLINGS = (
    Spelling("mlp.gate", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), _DOWN),  # Qwen; also all of GGUF
    Spelling("block_sparse_moe.gate", (_MIXTRAL + "w1", _MIXTRAL + "w3"), _MIXTRAL + "w2"),
    Spelling("block_sparse_moe.router.layer", (_GRANITE.format("in"),), _GRANITE.format("out")),
    Spelling("mlp.router", _FUSED, _DOWN, interleaved=True),  # gpt-oss
    Spelling("mlp.gate", _FUSED, _DOWN),  # what transformers 5 has in memory, and may save
    Spelling("router.proj", ("experts.{}.gate_up_proj",), "experts.{}.down_proj"),  # Gemma 4
    Spelling("router.proj", ("experts.{}.gate_proj", "experts.{}.up_proj"), "experts.{}.down_proj"),
)


@dataclass(frozen=True, slots=True)
class ExpertLinears:
    """The linears of the router and of every expert of a layer."""

    router: StackedLinear
    gate_up: Sequence[StackedLinear]
    down: Sequence[StackedLinear]
    count: int
    scaled: bool  # whether each expert has a factor of its weight

    @classmethod
    def of(cls, spec: ExpertsSpec, hidden: int, names: Spelling) -> "ExpertLinears":
        inner = spec.intermediate_size
        rows = (2 * inner // len(names.gate_up),) * len(names.gate_up)
        order = torch.arange(2 * inner).view(inner, 2).T.flatten() if names.interleaved else None
        gate_up, down = [], []
        for expert in range(spec.count):
            both = tuple(module.format(expert) for module in names.gate_up)
            gate_up.append(StackedLinear(both, rows, hidden, spec.bias, order, names.interleaved))
            module = (names.down.format(expert),)
            down.append(StackedLinear(module, (hidden,), inner, spec.bias, transposed=names.interleaved))
        router = StackedLinear((names.router,), (spec.count,), hidden, spec.router_bias, exact=True)
        return cls(router, gate_up, down, spec.count, spec.beside_mlp)

    def scales(self, prefix: str) -> PlainWeight | None:
        """Returns the factors of the experts' weights, if there are any. prefix: what the layer's names begin with."""
        return PlainWeight(f"{prefix}router.per_expert_scale", (self.count,)) if self.scaled else None


def spelling(names: Sequence[str], prefix: str) -> Spelling:
    """Returns how a checkpoint spells the experts of a layer: as most modules of the router and the first expert are.

    names: of its tensors; prefix: what those of the layer begin with.
    """
    own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def found(one: Spelling) -> int:
        return sum(any(name.startswith(f"{module}.") for name in own) for module in one.of_first)

    return max(SPELLINGS, key=found)
