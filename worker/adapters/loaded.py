"""An adapter in memory: for each linear that it changes, the packed product of its modules.

Both matrices of a product are packed as linears are, so each row of its result has bits that depend on this row alone
(worker/kernels/linear.py). The modules of one linear are side by side in one product: their matrices A are stacked, and
each has columns of its own in B, with zeros elsewhere.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.adapters.files import WEIGHTS, AdapterError, AdapterFiles
from shared.adapters.low_rank import LowRank, StoredFactor, low_rank_modules
from worker.adapters.sites import Rows, Sites
from worker.kernels.linear import PackedLinear, linear, pack

NOT_OF_TEXT = ("vision", "visual", "audio")  # words in the names of encoders, whose layers have numbers, too
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.(.+)")
RANK_STEP = 32  # ranks are padded with zeros to multiples of this, which every kernel can read


@dataclass(frozen=True, slots=True)
class Product:
    """What an adapter adds to the output of a linear: scale * (x A B), computed row by row."""

    a: PackedLinear  # inputs → ranks of all modules
    b: PackedLinear  # ranks → outputs
    scale: Tensor  # [outputs] float32

    def of(self, x: Tensor, multiply: Callable[..., Tensor] = linear) -> Tensor:
        """Returns what is added to the linear's output for the rows x [T, K]: [T, N] float32."""
        return multiply(multiply(x, self.a), self.b, fp32_out=True) * self.scale


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """products: by the id of the PackedLinear that they change"""

    sha256: str
    products: Mapping[int, Product]


def load_adapter(
    files: AdapterFiles, sites: Sites, dtype: torch.dtype, device: torch.device, max_rank: int
) -> LoadedAdapter:
    """Packs an adapter for a model with these sites. Raises AdapterError."""
    changed: defaultdict[int, list[tuple[Rows, LowRank]]] = defaultdict(list)
    seen: dict[tuple[Rows, ...], str] = {}
    for module, product in low_rank_modules(files, max_rank).items():
        found = _sites_of(module, sites)
        if (other := seen.setdefault(found, module)) is not module:
            raise AdapterError(f"the adapter has the same module twice: as {other} and as {module}")
        for rows in found:
            _check_shape(module, product, rows)
            changed[id(rows.linear)].append((rows, product))
    parts = changed.items()
    return LoadedAdapter(files.sha256, {key: _product(files, pairs, dtype, device) for key, pairs in parts})


def _sites_of(module: str, sites: Sites) -> tuple[Rows, ...]:
    matched = None if any(word in module for word in NOT_OF_TEXT) else IN_LAYER.fullmatch(module)
    found = None if matched is None else sites.get((int(matched[1]), matched[2]))
    if found is None:
        raise AdapterError(f"the adapter changes {module}, which the base model lacks or which adapters cannot change")
    return found


def _check_shape(module: str, product: LowRank, rows: Rows) -> None:
    shape, wanted = (product.b.shape[0], product.a.shape[1]), (len(rows.places), rows.inputs)
    if shape != wanted:
        raise AdapterError(
            f"{module}: the adapter is for a weight of {shape[0]} x {shape[1]}, "
            f"but the base model's is {wanted[0]} x {wanted[1]}"
        )


def _product(
    files: AdapterFiles, pairs: Sequence[tuple[Rows, LowRank]], dtype: torch.dtype, device: torch.device
) -> Product:
    rank = sum(low.rank for _, low in pairs)
    padded = -(-rank // RANK_STEP) * RANK_STEP
    first = pairs[0][0]
    a, b = torch.zeros(padded, first.inputs), torch.zeros(first.outputs, padded)
    scale, at = torch.ones(first.outputs), 0
    for rows, low in pairs:
        own, inside = slice(at, at + low.rank), rows.places >= 0
        places = rows.places[inside]
        a[own] = _read(files, low.a)
        b[places, own] = _read(files, low.b)[inside]
        scale[places] = low.scale
        at += low.rank
    packed = [pack(matrix.to(dtype).to(device), invariant=True) for matrix in (a, b)]
    return Product(packed[0], packed[1], scale.to(device))


def _read(files: AdapterFiles, factor: StoredFactor) -> Tensor:
    content = bytearray(memoryview(files.weights)[factor.begin : factor.end])
    values = torch.frombuffer(content, dtype=DTYPES[factor.dtype]).view(factor.shape).float()
    if not values.isfinite().all():
        raise AdapterError(f"{WEIGHTS} has numbers that are not finite")
    return values
