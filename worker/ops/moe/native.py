"""Calls the C library for a mixture of experts (csrc/experts.c).

The structures have the same fields, in the same order, as the structs in csrc/experts.h.
"""

import ctypes
from ctypes import Structure, c_int, c_long, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.cpu.bindings import address
from worker.kernels.cpu.library import kernels, library
from worker.kernels.cpu.limits import MAX_CHOSEN
from worker.kernels.cpu.packed_experts import CpuExperts
from worker.kernels.cpu.packed_weight import CpuWeight
from worker.kernels.cpu.ranks_c import RanksC

KERNELS = ("gemm", "act_and_mul", "combine")  # the functions of struct ExpertKernels, in its order


class ExpertKernelsStruct(Structure):
    _fields_ = [*((name, c_void_p) for name in KERNELS), ("is_bf16", c_int)]


class ExpertsStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("router", "gate_up", "down", "scales", "choice_bias", "loads", "ranks")),
        ("count", c_long), ("chosen", c_long), ("sigmoid", c_int), ("normalized", c_int), ("activation", c_int),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CExperts:
    """The experts of a layer. E: the number of experts; H: hidden size; I: intermediate size."""

    router: CpuWeight  # H → E
    gate_up: CpuExperts  # H → 2 I: gate, then up
    down: CpuExperts  # I → H
    scales: Tensor | None  # [E] float32: factors of the routing weights
    choice_bias: Tensor | None  # [E] float32: added to the sigmoids when experts are chosen, not to the weights
    loads: Tensor | None  # [E] int64: counts the rows that choose each expert
    chosen: int  # how many experts each row chooses
    sigmoid: bool  # if true, routing weights are sigmoids of the logits, else their softmax
    normalized: bool  # if true, the weights of a row's experts are divided by their sum
    activation: int  # its index in ACTIVATIONS of activate.py

    def struct(self, ranks: RanksC | None = None, parts: int = 0) -> ExpertsStruct:
        """Returns a struct that is valid as long as this record exists.

        ranks: the processes that hold the other rows of gate_up and down; None if this process holds all rows
        parts: how many processes hold rows of gate_up and down; 0: as many as `ranks` says
        """
        parts = parts or (1 if ranks is None else ranks.count)
        count, hidden, inner = self.gate_up.count, self.gate_up.k, self.down.k
        assert self.router.n == self.down.count == count and 0 < self.chosen <= min(count, MAX_CHOSEN)
        assert self.router.k == parts * self.down.n == hidden and parts * self.gate_up.n == 2 * inner
        for each in (self.scales, self.choice_bias):
            assert each is None or (each.dtype == torch.float32 and each.shape == (count,) and each.is_contiguous())
        assert self.sigmoid or self.choice_bias is None
        assert self.loads is None or (self.loads.dtype == torch.int64 and self.loads.shape == (count,))
        return ExpertsStruct(
            ctypes.addressof(self.router.struct),
            ctypes.addressof(self.gate_up.structs),
            ctypes.addressof(self.down.structs),
            address(self.scales), address(self.choice_bias), address(self.loads),
            None if ranks is None else ctypes.addressof(ranks.struct),
            count, self.chosen, self.sigmoid, self.normalized, self.activation,
        )  # fmt: skip


def expert_kernels(dtype: torch.dtype) -> ExpertKernelsStruct:
    functions = kernels()[dtype]
    addresses = (ctypes.cast(getattr(functions, name), c_void_p) for name in KERNELS)
    return ExpertKernelsStruct(*addresses, dtype == torch.bfloat16)


def scratch_bytes(experts: ExpertsStruct, dtype: torch.dtype, rows: int) -> int:
    """Returns how many bytes of scratch memory the library needs to compute `rows` rows."""
    found = library()
    assert found is not None
    found.experts_scratch.restype = c_long
    return int(found.experts_scratch(ctypes.byref(experts), c_int(dtype == torch.bfloat16), c_long(rows)))


def experts(
    h: Tensor,
    layer: CExperts,
    *,
    router_input: Tensor | None = None,
    add: Tensor | None = None,
    add_gate: Tensor | None = None,
) -> Tensor:
    """Computes the same as `experts_torch` in worker/kernels/experts.py. h [T, H] contiguous.

    Raises MemoryError when there is no memory for the threads' buffers.
    """
    (t, hidden), dtype, found, struct = h.shape, h.dtype, library(), layer.struct()
    assert found is not None and h.is_contiguous() and hidden == layer.router.k and dtype == layer.gate_up.dtype
    for rows in (router_input, add):
        assert rows is None or (rows.shape == h.shape and rows.dtype == dtype and rows.is_contiguous())
    assert add_gate is None or (add_gate.numel() == t and add_gate.dtype == torch.float32 and add_gate.is_contiguous())
    out = torch.empty_like(h)
    scratch = torch.empty(scratch_bytes(struct, dtype, t), dtype=torch.uint8)
    if found.experts_forward(
        ctypes.byref(struct), ctypes.byref(expert_kernels(dtype)), c_void_p(address(router_input)),
        c_void_p(h.data_ptr()), c_void_p(address(add)),
        c_void_p(address(add_gate)), c_void_p(out.data_ptr()), c_long(t), c_void_p(scratch.data_ptr()),
        c_int(torch.get_num_threads()),
    ):  # fmt: skip
        raise MemoryError("no memory for the buffers of a matmul")
    return out


def choose(logits: Tensor, layer: CExperts) -> tuple[Tensor, Tensor]:
    """Chooses each row's experts as `experts` does, by logits [T, E] float32. Returns the experts [T, chosen] int32 and
    their weights [T, chosen] float32."""
    parts = layer.router.k // layer.down.n  # other processes may hold the other rows of gate_up and down, not read here
    found, struct, shape = library(), layer.struct(parts=parts), (len(logits), layer.chosen)
    assert found is not None and logits.shape[1] == layer.router.n
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    numbers, weights = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
    found.experts_choose(
        ctypes.byref(struct), c_void_p(logits.data_ptr()), c_long(len(logits)), c_void_p(numbers.data_ptr()),
        c_void_p(weights.data_ptr()),
    )  # fmt: skip
    return numbers, weights


def combine(
    results: Tensor, weights: Tensor, add: Tensor | None, add_gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Sums the results of each row's experts, [T, chosen, H] float32, as `experts` does. Returns [T, H] in `dtype`.

    weights [T, chosen]; add [T, H] in `dtype`, add_gate [T, 1] float32: as for `experts_torch`
    """
    (t, chosen, hidden), out = results.shape, results.new_empty(results.shape[::2], dtype=dtype)
    assert results.is_contiguous() and weights.is_contiguous() and weights.shape == (t, chosen)
    assert add is None or (add.dtype == dtype and add.is_contiguous() and add.shape == out.shape)
    assert add_gate is None or (add_gate.numel() == t and add_gate.is_contiguous())
    places = torch.arange(t * chosen, dtype=torch.int32)
    kernels()[dtype].combine(
        results.data_ptr(), places.data_ptr(), weights.data_ptr(), address(add), address(add_gate), out.data_ptr(),
        t, chosen, hidden, torch.get_num_threads(),
    )  # fmt: skip
    return out
