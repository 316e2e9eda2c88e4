"""Finds the linear layers of a model that an adapter can change, including those of experts, by module name.

A linear layer in memory consists of one or several modules of the checkpoint. Their rows may be in another order, and
the last rows of the first module may be a separate linear layer (checkpoint/stacked_linear.py). An adapter may also use
one name for several modules of the checkpoint, such as `qkv_proj` for q_proj, k_proj and v_proj.
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

GATES = "gates"  # the field of a layer part's weights with the rows that are a separate linear (StackedLinear.apart)
TOGETHER = {"q_proj k_proj v_proj": "qkv_proj", "gate_proj up_proj": "gate_up_proj"}  # modules → one common name


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Maps the output rows of a module to the output rows of a linear layer in memory.

    places: for each row of the module, its row in memory, [module rows] int64; -1 if this linear lacks the row
    expert: the number of the expert, if `linear` holds experts
    """

    linear: PackedLinear | PackedExperts
    inputs: int
    outputs: int  # the number of output rows of the linear in memory
    places: Tensor
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Sites:
    """All modules of a model that an adapter can change. rows: (layer number, module name in the layer) → its rows"""

    spec: ModelSpec
    rows: Mapping[tuple[int, str], tuple[Rows, ...]]


def sites_of(folder: Path, spec: ModelSpec, weights: Weights) -> Sites:
    """Returns the Sites of the model whose checkpoint is in `folder`. Raises CheckpointError."""
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
    """Yields (module name, rows) for a mixer or a feed-forward network. A module may have several names."""
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
    """Returns the rows of each expert's modules, both by the checkpoint's names and by the names of Qwen."""
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
    """Returns Rows.places for each module: the row in memory of each row of the module."""
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
    """Yields the rows of a module in the linear `linear`, and its rows in the separate linear `gates`, if any."""
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
    """Returns the common name that other checkpoints use for these modules; empty if there is none."""
    parents = {module.rpartition(".")[0] for module in stacked.modules}
    one = TOGETHER.get(" ".join(module.rpartition(".")[2] for module in stacked.modules), "")
    return f"{parents.pop()}.{one}".lstrip(".") if one and len(parents) == 1 else ""
