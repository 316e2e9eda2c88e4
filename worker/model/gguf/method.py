"""Checkpoints with `quant_method: gguf`, which shared/gguf writes for GGUF files: weights in block formats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.kernels.quantized_weight import QuantizedWeight
from worker.model.gguf.blocks import FORMATS, BlockFormat
from worker.model.quantization.codes import check_finite
from worker.model.spec import StoredQuantization
from worker.model.stored_weight import PLAIN, ExpectedTensor, Layout, ReadTensor, Shape, StoredTensors


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [N, K] in a block format. type: the type of its tensor, which may be one that is not supported."""

    name: str
    shape: Shape
    type: str
    stored_in: StoredTensors

    @property
    def _format(self) -> BlockFormat:
        return FORMATS[self.type]

    @property
    def layout(self) -> Layout | None:
        if self.type not in FORMATS:
            return None  # the check of the tensors will refuse it
        return Layout(self._format.code_map, self._format.group_size, self._format.minimum)

    def tensors(self) -> Sequence[ExpectedTensor]:
        return [ExpectedTensor(self.name, self.shape, (*PLAIN, *FORMATS))]

    def read(self, read: ReadTensor, dtype: torch.dtype) -> Tensor | QuantizedWeight:
        rows = read(self.name, (self.shape[0], self._format.row_bytes(self.shape[1])), torch.uint8)
        weight = self._format.quantized_weight(rows)
        check_finite(weight.scale, self.name, self.stored_in)
        if weight.minimum is not None:
            check_finite(weight.minimum, self.name, self.stored_in)
        return weight


@dataclass(frozen=True, slots=True)
class GgufMethod:
    """Any weight may be in any block format. stored: a summary."""

    stored: StoredQuantization

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> BlockWeight | None:
        plain = name not in tensors or tensors.format(name) in PLAIN
        return None if plain else BlockWeight(name, shape, tensors.format(name), tensors)


def read(settings: Mapping[str, Any]) -> GgufMethod:
    return GgufMethod(StoredQuantization(str(settings["kind"])))
