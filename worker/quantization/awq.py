"""Reads checkpoints with `quant_method: awq` in the layout `gemm`: unsigned codes of 4 bits, packed along the outputs.

A weight [N, K] is stored as qweight [K, N / 8], qzeros [groups, N / 8] and scales [groups, N]. An int32 has the codes
of eight consecutive outputs; from the lowest bits on, they belong to the outputs 0, 2, 4, 6, 1, 3, 5, 7 of these eight.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import ExpectedTensor, Layout, ReadTensor, Shape, StoredTensors, check_finite
from worker.ops.quantized_weight import INT4, INT8, QuantizedWeight
from worker.spec import StoredQuantization

METHOD, BITS = "awq", 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # ORDER[i]: to which of eight outputs the code at place i of an int32 belongs


@dataclass(frozen=True, slots=True)
class Awq:
    """The settings of an AWQ checkpoint. A linear is quantized if the checkpoint has its qweight.

    group_size: how many inputs share a scale; 0: all
    zero_point: if true, zero points are stored; otherwise every zero point is half the number of codes
    """

    group_size: int
    zero_point: bool

    @property
    def ignored(self) -> tuple[str, ...]:
        return () if self.zero_point else (".qzeros",)

    @property
    def stored(self) -> StoredQuantization:
        return StoredQuantization("int4", f"{self.group_size} values" if self.group_size else "a row")

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> "AwqWeight | None":
        exists = name.removesuffix("weight") + "qweight" in tensors
        return AwqWeight(name, shape, tensors, self) if exists else None


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """A quantized weight [N, K] of an AWQ checkpoint."""

    name: str
    shape: Shape
    checkpoint: StoredTensors
    settings: Awq

    @property
    def layout(self) -> Layout:
        return Layout(INT4, self.settings.group_size, self.settings.zero_point)

    @property
    def group_size(self) -> int:
        return self.settings.group_size or self.shape[1]

    def tensors(self) -> list[ExpectedTensor]:
        (n, k), module = self.shape, self.name.removesuffix("weight")
        groups, words = -(-k // self.group_size), -(-n // len(ORDER))
        found = [
            ExpectedTensor(module + "qweight", (k, words), ("I32",)),
            ExpectedTensor(module + "scales", (groups, n)),
        ]
        zeros = ExpectedTensor(module + "qzeros", (groups, words), ("I32",))
        return [*found, zeros] if self.settings.zero_point else found

    def read(self, read: ReadTensor, dtype: torch.dtype) -> QuantizedWeight:
        qweight, scales, *rest = self.tensors()
        codes = self._unpack(read(qweight.name, qweight.shape, torch.int32))
        scale = check_finite(read(scales.name, scales.shape, torch.float32), scales.name, self.checkpoint)
        zero = self._unpack(read(rest[0].name, rest[0].shape, torch.int32)) if rest else None
        return signed(codes, BITS, scale.T.contiguous(), zero, self.group_size)

    def _unpack(self, words: Tensor) -> Tensor:
        """Unpacks int32 [X, N / 8] to codes [N, X]."""
        count, columns = words.shape[1], words.shape[0]
        bytes_ = words.T.flatten().view(torch.uint8).view(count, columns, 4)
        codes = torch.empty(count, len(ORDER), columns, dtype=torch.uint8, device=words.device)
        for at, output in enumerate(ORDER):
            torch.bitwise_right_shift(bytes_[..., at // 2], 4 * (at % 2), out=codes[:, output])
        return codes.bitwise_and_(15).flatten(0, 1)[: self.shape[0]]


def read(settings: Mapping[str, Any]) -> Awq:
    """Reads a quantization_config. Raises CheckpointError when a setting is not supported."""
    layout = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if layout != "gemm":
        raise CheckpointError(f"quant_method {METHOD!r}: version {layout!r} is not supported; supported is gemm")
    bits = settings.get("bits", settings.get("w_bit", BITS))
    if bits != BITS:
        raise CheckpointError(
            f"quant_method {METHOD!r}: weights of {bits} bits are not supported; supported are {BITS}"
        )
    size = check_group_size(settings.get("group_size", settings.get("q_group_size", 128)), METHOD)
    return Awq(size, bool(settings.get("zero_point", True)))


# Turns stored codes into the codes, scales and minimums of a QuantizedWeight, and checks settings.
#
# An unsigned code q with a zero point z means the number scale * (q - z). A QuantizedWeight has the signed code q -
# h, where h is half the number of codes. The number is then scale * (q - h) + minimum, with minimum = scale * (h -
# z).

CODE_MAPS = {4: INT4, 8: INT8}


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpacks integers [.., W] to unsigned codes [.., W * bits of an integer / bits] uint8, lowest bits first."""
    bytes_ = words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)
    if bits == 8:
        return bytes_
    codes = torch.empty(*bytes_.shape, 2, dtype=torch.uint8, device=words.device)
    torch.bitwise_and(bytes_, 15, out=codes[..., 0])
    torch.bitwise_right_shift(bytes_, 4, out=codes[..., 1])
    return codes.flatten(-2)


def signed(
    codes: Tensor, bits: int, scale: Tensor, zero: Tensor | None, group_size: int, order: Tensor | None = None
) -> QuantizedWeight:
    """Returns the weight scale * (codes - zero).

    codes: unsigned codes [N, K] uint8; they are changed in place
    scale: [N, groups] float32
    zero: zero points [N, groups]; None: every zero point is half the number of codes
    order: indices of the inputs, sorted by group; None: they are sorted already
    """
    half = 1 << (bits - 1)
    minimum = None if zero is None or bool((zero == half).all()) else scale * (half - zero.float())
    if order is not None:
        codes = codes.index_select(1, order)
    return QuantizedWeight(codes.bitwise_xor_(half), CODE_MAPS[bits], scale, minimum, group_size, order)


def input_order(g_idx: Tensor, group_size: int, name: str, tensors: StoredTensors) -> Tensor | None:
    """Returns the indices of the inputs, sorted by group; None if they are sorted already.

    g_idx: the group of each input, [K]

    Raises CheckpointError unless every group has `group_size` inputs. The last group may have fewer.
    """
    index, k = g_idx.long(), len(g_idx)
    expected = torch.arange(k, device=index.device) // group_size
    if torch.equal(index, expected):
        return None
    ordered = index.sort(stable=True)
    if not torch.equal(ordered.values, expected):
        raise CheckpointError(f"{tensors.where(name)}: tensor {name} does not give every group {group_size} inputs")
    return ordered.indices


def check_group_size(size: object, method: str) -> int:
    """Returns a config's group size; 0: all inputs, which a config states as -1 or null.

    Raises CheckpointError if the group size is not supported.
    """
    if size is None or size == -1:
        return 0
    if isinstance(size, int) and size > 0 and size % 16 == 0:
        return size
    raise CheckpointError(
        f"quant_method {method!r}: group_size {size!r} is not supported; supported are multiples of 16"
    )


def check_pattern(pattern: str, method: str) -> str:
    """Returns a config's pattern. Raises CheckpointError if the pattern is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"quant_method {method!r}: {pattern!r} is not a regular expression ({error})") from error
    return pattern
