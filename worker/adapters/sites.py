"""The linears of a model that an adapter can change, those of experts too, by the names of their modules.

A linear in memory is made of one or several modules of the checkpoint, whose rows may be in another order, and the last
rows of the first one may be a linear of their own (checkpoint/stacked_linear.py). An adapter may also name one module
where the checkpoint has several, as `qkv_proj` for q_proj, k_proj and v_proj.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.kernels.experts import PackedExperts
from worker.kernels.linear import PackedLinear
from worker.model.checkpoint.language_model import EMBED, find_embedding
from worker.model.checkpoint.stacked_linear import StackedLinear
from worker.model.feed_forward.kinds import feed_forward
from worker.model.layer import Weights
from worker.model.layer_names import LayerNames
from worker.model.layer_parts import StoredPart
from worker.model.mixers.kinds import mixer
from worker.model.source import open_source
from worker.spec import LayerSpec, ModelSpec

GATES = "gates"  # the field of a part's weights for rows that are `apart`
TOGETHER = {"q_proj k_proj v_proj": "qkv_proj", "gate_proj up_proj": "gate_up_proj"}  # modules → one name for all


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where the output of a module is in the output of a linear in memory.

    places: the row in memory of each of the module's rows, [its rows] int64; -1 for a row that the linear lacks
    expert: whose linear it is, if experts have one each
    """

    linear: PackedLinear | PackedExperts
    inputs: int
    outputs: int  # of the linear
    places: Tensor
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Sites:
    """rows: by the number of a layer, and the name of a module in it"""

    spec: ModelSpec
    rows: Mapping[tuple[int, str], tuple[Rows, ...]]


def sites_of(folder: Path, spec: ModelSpec, weights: Weights) -> Sites:
    """Returns the sites of a model whose checkpoint is in `folder`. Raises CheckpointError."""
    source = open_source(folder, None)
    try:
        prefix = (find_embedding(source.tensors) or EMBED).removesuffix(EMBED)
        names = LayerNames.of(spec, source.tensors.names(), prefix)
    finally:
        source.close()
    found: dict[tuple[int, str], tuple[Rows, ...]] = {}
    for index, (layer, own) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        for part, held in (
            (mixer(layer.mixer).stored, own.mixer),
            (feed_forward(layer.feed_forward).stored, own.feed_forward),
        ):
            where = part, held, spec, layer, names
            for module, rows in chain(_of_part(*where), _of_experts(*where).items()):
                found[index, module] = (*found.get((index, module), ()), rows)
    return Sites(spec, found)


def _of_part(
    part: StoredPart, held: Any, spec: ModelSpec, layer: LayerSpec, names: LayerNames
) -> Iterator[tuple[str, Rows]]:
    """Yields the modules of a mixer or a feed-forward network with their rows, under each name that they have."""
    common, spelled = part.linears(spec, layer, names), part.spelled_linears(spec, layer, names)
    for field, stacked in spelled.items():
        owner = held if hasattr(held, field) else getattr(held, "shared", None)
        linear = getattr(owner, field, None)
        if stacked.exact or not isinstance(linear, PackedLinear):
            continue
        modules = list(zip(stacked.modules, common[field].modules, _places(stacked), strict=True))
        for name, other, places in modules:
            for each in {name, other}:
                yield from ((each, rows) for rows in _divided(stacked, linear, getattr(owner, GATES, None), places))
        if (together := _together(common[field])) and len(set(stacked.modules)) == len(modules):
            whole = torch.cat([places for _, _, places in modules])
            yield from ((together, rows) for rows in _divided(stacked, linear, getattr(owner, GATES, None), whole))


def _of_experts(
    part: StoredPart, held: Any, spec: ModelSpec, layer: LayerSpec, names: LayerNames
) -> Mapping[str, Rows]:
    """Returns the rows of each expert's modules, by the names in the checkpoint and by those of Qwen."""
    found: dict[str, Rows] = {}
    for spelled in (replace(names, modules=frozenset()), names):
        for field, linears in part.stacks(spec, layer, spelled).items():
            packed, places = getattr(held.experts, field.removeprefix("expert_")), _places(linears[0])
            whole = torch.cat(places)
            for expert, stacked in enumerate(linears):
                inputs, outputs = stacked.columns, sum(stacked.rows)
                rows = [Rows(packed, inputs, outputs, own, expert) for own in places]
                found |= zip(stacked.modules, rows, strict=True)
                if together := _together(stacked):
                    found[together] = Rows(packed, inputs, outputs, whole, expert)
    return found


def _places(stacked: StackedLinear) -> list[Tensor]:
    """Returns for each module the place in memory of each of its rows."""
    found, start = [], 0
    for rows, order in zip(stacked.rows, stacked.orders(torch.device("cpu")), strict=True):
        places = torch.empty(rows, dtype=torch.int64)
        places[order] = torch.arange(start, start + rows)
        found.append(places)
        start += rows
    return found


def _divided(
    stacked: StackedLinear, linear: PackedLinear, gates: PackedLinear | None, places: Tensor
) -> Iterator[Rows]:
    """Yields the rows of a linear in memory, and those of the linear that some of them are apart from it."""
    total = sum(stacked.rows)
    if not stacked.apart:
        yield Rows(linear, stacked.columns, total, places)
        return
    assert gates is not None
    begin, end = stacked.rows[0] - stacked.apart, stacked.rows[0]
    inside = (places >= begin) & (places < end)
    behind = torch.where(places >= end, places - stacked.apart, places)
    if not inside.all():
        yield Rows(linear, stacked.columns, total - stacked.apart, behind.masked_fill(inside, -1))
    if inside.any():
        yield Rows(gates, stacked.columns, stacked.apart, (places - begin).masked_fill(~inside, -1))


def _together(stacked: StackedLinear) -> str:
    """Returns the one name of modules that other checkpoints have as one; empty if there is none."""
    parents = {module.rpartition(".")[0] for module in stacked.modules}
    one = TOGETHER.get(" ".join(module.rpartition(".")[2] for module in stacked.modules), "")
    return f"{parents.pop()}.{one}".lstrip(".") if one and len(parents) == 1 else ""
