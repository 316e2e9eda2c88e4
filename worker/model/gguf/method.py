"""Reads weights in block formats, from checkpoints with `quant_method: gguf`, as shared/gguf makes from GGUF files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from shared.gguf.index import TiledHeads
from worker.kernels.weights.quantized_weight import QuantizedWeight
from worker.model.checkpoint.checkpoint import CheckpointError
from worker.model.checkpoint.stored_weight import (
    PLAIN,
    ExpectedTensor,
    Layout,
    ReadTensor,
    Shape,
    StoredTensors,
    check_finite,
)
from worker.model.gguf.blocks import FORMATS, BlockFormat
from worker.model.gguf.layout import column_order
from worker.spec import StoredQuantization


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [N, K] in a block format.

    type: the name of the format, which may be an unsupported one
    columns: the index in the file of each column of the weight; None: the order is the same
    """

    name: str
    shape: Shape
    type: str
    stored_in: StoredTensors
    columns: Tensor | None = None

    @property
    def _format(self) -> BlockFormat:
        return FORMATS[self.type]

    @property
    def layout(self) -> Layout | None:
        if self.type not in FORMATS:
            return None  # check_tensors will refuse the type
        return Layout(self._format.code_map, self._format.group_size, self._format.minimum)

    def tensors(self) -> Sequence[ExpectedTensor]:
        return [ExpectedTensor(self.name, self.shape, (*PLAIN, *FORMATS))]

    def read(self, read: ReadTensor, dtype: torch.dtype) -> Tensor | QuantizedWeight:
        rows = read(self.name, (self.shape[0], self._format.row_bytes(self.shape[1])), torch.uint8)
        weight = self._format.quantized_weight(rows)
        check_finite(weight.scale, self.name, self.stored_in)
        if weight.minimum is not None:
            check_finite(weight.minimum, self.name, self.stored_in)
        return weight if self.columns is None else self._reordered(weight, self.columns.to(weight.codes.device))

    def _reordered(self, weight: QuantizedWeight, columns: Tensor) -> QuantizedWeight:
        """Reorders columns. Groups of columns stay together, so a group keeps its scale and minimum.

        Raises CheckpointError if a group would have to be split.
        """
        size = weight.group_size
        groups = columns[::size] // size
        if not torch.equal(columns, (groups[:, None] * size + torch.arange(size, device=columns.device)).flatten()):
            raise CheckpointError(
                f"{self.stored_in.where(self.name)}: tensor {self.name} is stored as {self.type}, whose groups of "
                f"{size} columns belong to several value heads; supported are value heads of whole groups"
            )
        minimum = None if weight.minimum is None else weight.minimum[:, groups]
        return replace(weight, codes=weight.codes[:, columns], scale=weight.scale[:, groups], minimum=minimum)


@dataclass(frozen=True, slots=True)
class GgufMethod:
    """The weights of a GGUF model. Each weight may be in a block format of its own.

    stored: names the format for logs
    tiled_heads: as in shared/gguf/index.py
    """

    stored: StoredQuantization
    tiled_heads: TiledHeads | None = None

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> BlockWeight | None:
        plain = name not in tensors or tensors.format(name) in PLAIN
        columns = column_order(name, self.tiled_heads)
        return None if plain else BlockWeight(name, shape, tensors.format(name), tensors, columns)


def read(settings: Mapping[str, Any]) -> GgufMethod:
    heads = settings.get("tiled_heads")
    return GgufMethod(StoredQuantization(str(settings["kind"])), heads and msgspec.convert(heads, TiledHeads))
