"""Finds the linear layers of a model that an adapter can change, including those of experts, by module name.

A linear layer in memory consists of one or several modules of the checkpoint. Their rows may be in another order, and
the last rows of the first module may be a separate linear layer (checkpoint/stored_weight.py). An adapter may also use
one name for several modules of the checkpoint, such as `qkv_proj` for q_proj, k_proj and v_proj.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import read_config
from worker.checkpoint.stored_weight import EMBED, StackedLinear, find_embedding
from worker.models import single_blocks
from worker.models.decoder import Weights
from worker.models.layer_kinds import LayerNames, StoredPart, feed_forward, mixer
from worker.models.load import open_source
from worker.models.sharding import Part, Share
from worker.ops.linear.packed import PackedLinear
from worker.ops.moe.packed import PackedExperts
from worker.spec import LayerSpec, ModelSpec

GATES = "gates"  # the field of a layer part's weights with the rows that are a separate linear (StackedLinear.apart)
TOGETHER = {"q_proj k_proj v_proj": "qkv_proj", "gate_proj up_proj": "gate_up_proj"}  # modules → one common name


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Maps the output rows of a module to the output rows of a linear layer in memory.

    linear: None if another process has the layer
    places: for each row of the module, its row in memory, [module rows] int64; -1 if this linear lacks the row
    expert: the number of the expert, if `linear` holds experts
    """

    linear: PackedLinear | PackedExperts | None
    inputs: int
    outputs: int  # the number of output rows of the linear in memory
    places: Tensor
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Sites:
    """All modules of a model that an adapter can change. rows: (layer number, module name in the layer) → its rows"""

    spec: ModelSpec
    rows: Mapping[tuple[int, str], tuple[Rows, ...]]


def sites_of(folder: Path, spec: ModelSpec, weights: Weights, part: Part | None = None) -> Sites:
    """Returns the Sites of the model whose checkpoint is in `folder`. Raises CheckpointError.

    spec: of the whole model. part: the part that `weights` hold; None if they hold the whole model.
    """
    source = open_source(folder, None)
    try:
        prefix = (find_embedding(source.tensors) or EMBED).removesuffix(EMBED)
        names = LayerNames.of(spec, source.tensors.names(), prefix)
    finally:
        source.close()
    first, share = (0, None) if part is None else (part.stage.first, part.share)
    held = dict(enumerate(weights.layers, first))
    found: dict[tuple[int, str], tuple[Rows, ...]] = {}
    for index, layer in enumerate(spec.layers):
        own = held.get(index)
        for half in (
            Half(mixer(layer.mixer).stored, own and own.mixer, spec, layer, share),
            Half(feed_forward(layer.feed_forward).stored, own and own.feed_forward, spec, layer, share),
        ):
            for module, rows in chain(_of_linears(half, names), _of_experts(half, names).items()):
                found[index, module] = (*found.get((index, module), ()), rows)
    config = read_config(folder)
    if config.get("model_type") == single_blocks.MODEL_TYPE:
        names_of = single_blocks.block_names(config)
        found = {names_of(*place): rows for place, rows in found.items()}
    return Sites(spec, found)


@dataclass(frozen=True, slots=True)
class Half:
    """The mixer or the feed-forward network of a layer.

    held: its weights; None if another process has the layer. share: what this process has of it; None: all.
    """

    stored: StoredPart
    held: Any
    spec: ModelSpec
    layer: LayerSpec
    share: Share | None

    def owner(self, field: str) -> Any:
        """Returns the record that has a linear: the weights themselves, or their shared expert."""
        return self.held if hasattr(self.held, field) else getattr(self.held, "shared", None)

    def cut(self, field: str, stacked: StackedLinear) -> StackedLinear:
        return stacked if self.share is None else self.share.cut(field, stacked, self.spec, self.layer)


def _of_linears(half: Half, names: LayerNames) -> Iterator[tuple[str, Rows]]:
    """Yields (module name, rows) for the linears of a layer's half. A module may have several names."""
    stored, where = half.stored, (half.spec, half.layer, names)
    common, spelled = stored.linears(*where), stored.spelled_linears(*where)
    for field, whole_linear in spelled.items():
        if whole_linear.exact:
            continue
        stacked, owner = half.cut(field, whole_linear), half.owner(field)
        linear, gates = getattr(owner, field, None), getattr(owner, GATES, None)
        modules = list(zip(stacked.modules, common[field].modules, _places(stacked), strict=True))
        for name, other, places in modules:
            for each in {name, other}:
                yield from ((each, rows) for rows in _divided(stacked, linear, gates, places))
        if (together := _together(common[field])) and len(set(stacked.modules)) == len(modules):
            whole = torch.cat([places for _, _, places in modules])
            yield from ((together, rows) for rows in _divided(stacked, linear, gates, whole))


def _of_experts(half: Half, names: LayerNames) -> Mapping[str, Rows]:
    """Returns the rows of each expert's modules, both by the checkpoint's names and by the names of Qwen."""
    found: dict[str, Rows] = {}
    for spelled in (replace(names, modules=frozenset()), names):
        for field, linears in half.stored.stacks(half.spec, half.layer, spelled).items():
            packed = half.held and getattr(half.held.experts, field.removeprefix("expert_"))
            cut = half.cut(field, linears[0])
            places, outputs = _places(cut), cut.kept_rows
            whole = torch.cat(places)
            for expert, stacked in enumerate(linears):
                inputs = stacked.columns
                rows = [Rows(packed, inputs, outputs, own, expert) for own in places]
                found |= zip(stacked.modules, rows, strict=True)
                if together := _together(stacked):
                    found[together] = Rows(packed, inputs, outputs, whole, expert)
    return found


def _places(stacked: StackedLinear) -> list[Tensor]:
    """Returns Rows.places for each module: the row in memory of each row of the module."""
    found, start = [], 0
    for rows, order in zip(stacked.rows, stacked.orders(torch.device("cpu")), strict=True):
        in_memory = torch.arange(rows)[order]
        places = torch.full((rows,), -1)
        places[in_memory] = torch.arange(start, start + len(in_memory))
        found.append(places)
        start += len(in_memory)
    return found


def _divided(
    stacked: StackedLinear, linear: PackedLinear | None, gates: PackedLinear | None, places: Tensor
) -> Iterator[Rows]:
    """Yields the rows of a module in the linear `linear`, and its rows in the separate linear `gates`, if any."""
    total = stacked.kept_rows
    if not stacked.apart:
        yield Rows(linear, stacked.columns, total, places)
        return
    begin, end = stacked.first_rows - stacked.apart, stacked.first_rows
    inside = (places >= begin) & (places < end)
    behind = torch.where(places >= end, places - stacked.apart, places).masked_fill(inside, -1)
    if (behind >= 0).any():
        yield Rows(linear, stacked.columns, total - stacked.apart, behind)
    if inside.any():
        yield Rows(gates, stacked.columns, stacked.apart, (places - begin).masked_fill(~inside, -1))


def _together(stacked: StackedLinear) -> str:
    """Returns the common name that other checkpoints use for these modules; empty if there is none."""
    parents = {module.rpartition(".")[0] for module in stacked.modules}
    one = TOGETHER.get(" ".join(module.rpartition(".")[2] for module in stacked.modules), "")
    return f"{parents.pop()}.{one}".lstrip(".") if one and len(parents) == 1 else ""
