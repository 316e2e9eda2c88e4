"""Triton's interpreter as the tests run it: each sum has one fixed order, none is NumPy's BLAS, and launches are fast.

As Triton ships it, the interpreter multiplies matrices with `numpy.matmul`, a BLAS, which chooses the order of
additions by the shape of the product and by the processor; and `numpy.sum` adds a single column in another order than
several. So on some processors, the bits of a row would depend on other rows.

Here, a dot advances along K by the step of a tensor core: 16 numbers, or 32 numbers of eight bits. The products of a
step are added as a tree: the second half to the first half, until one sum is left. Then the sum is added to the
accumulator. `tl.sum` is the same tree along its axis. Both work on whole tiles, element by element, so no sum sees what
lies beside it. Products and sums of floats are rounded to float32. Products of 16-bit and 8-bit numbers are exact in
float32, and so are the sums of a step of int8.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

STEP, STEP_OF_BYTES = 16, 32  # how many numbers along K are added at once
# functions of NumPy that call the BLAS, or whose order of additions depends on shapes or the processor
NOT_OURS = (
    "convolve", "correlate", "dot", "einsum", "inner", "linalg", "matmul", "matvec", "mean", "sum", "tensordot",
    "trace", "vdot", "vecdot", "vecmat",
)  # fmt: skip
FLOAT8 = {
    name: torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    for name, dtype in (("fp8e4nv", torch.float8_e4m3fn), ("fp8e5", torch.float8_e5m2))
}


def prepare() -> None:
    """Changes the interpreter for the rest of the process. Is called once, after TRITON_INTERPRET was set."""
    from triton.runtime import interpreter

    interpreter.np = without_blas()
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.ReduceOps.sum = _sum
    interpreter._get_np_dtype = _KnownTypes(interpreter._get_np_dtype)
    interpreter._patch_lang = _Language(interpreter)
    _remember_shapes(interpreter.tl)
    # The interpreter computes overflow checks of integers, but without `debug` looks at none of them.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def dot(a: NDArray[Any], b: NDArray[Any], total: NDArray[Any], step: int = STEP) -> NDArray[Any]:
    """Returns total [M, N] + a [M, K] @ b [K, N], added in one fixed order, which depends on K and `step` alone.

    The operands are converted to float32, in which products are computed. The result has the type of `total`.
    """
    if len(a) > b.shape[1]:  # the longer side goes innermost, because NumPy's loops are then long
        return dot(b.T, a.T, total.T, step).T
    columns = np.ascontiguousarray(a.T, np.float32)  # [K, M]
    rows = np.ascontiguousarray(b, np.float32)  # [K, N]
    with np.errstate(all="ignore"):
        for k in range(0, len(rows), step):
            total = total + tree_sum(columns[k : k + step, :, None] * rows[k : k + step, None]).astype(total.dtype)
    return total


def tree_sum(terms: NDArray[Any], axis: int = 0) -> NDArray[Any]:
    """Adds along an axis, whose length is a power of two: the second half to the first half, until one is left."""
    terms = np.moveaxis(terms, axis, 0)
    while len(terms) > 1:
        half, odd = divmod(len(terms), 2)
        assert not odd, "Triton's tiles are powers of two"
        terms = terms[:half] + terms[half:]
    return terms[0]


def without_blas() -> ModuleType:
    """Returns a copy of the module NumPy in which the functions whose order of additions is not ours raise."""
    copy = ModuleType("numpy")
    copy.__dict__.update(vars(np))
    for name in NOT_OURS:
        if hasattr(np, name):
            setattr(copy, name, _Refused(name))
    return copy


class _Refused:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: object, **__: object) -> None:
        raise AssertionError(f"numpy.{self._name} adds in an order that depends on shapes, strides or the processor")

    def __getattr__(self, name: str) -> None:
        self()


def _create_dot(_: object, a: Any, b: Any, total: Any, *how: object) -> Any:
    step = STEP_OF_BYTES if a.dtype.primitive_bitwidth == 8 and b.dtype.primitive_bitwidth == 8 else STEP
    return type(total)(dot(_numbers(a), _numbers(b), total.data, step), total.dtype.scalar)


def _numbers(operand: Any) -> NDArray[Any]:
    """Returns an operand's numbers. The interpreter stores float8 as bytes and bfloat16 as 16-bit words."""
    if operand.dtype.is_fp8():
        return FLOAT8[operand.dtype.name][operand.data]
    if operand.dtype.is_bf16():
        return (operand.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert operand.dtype.is_floating() or operand.dtype.primitive_bitwidth == 8, "sums must be exact in float32"
    return operand.data


def _sum(self: Any, operand: Any) -> Any:
    data: NDArray[Any] = operand.handle.data
    with np.errstate(all="ignore"):
        found = tree_sum(data.reshape(-1) if self.axis is None else data, self.axis or 0)
    if self.keep_dims:
        found = found.reshape([1] * data.ndim) if self.axis is None else np.expand_dims(found, self.axis)
    return self.to_tensor(found, operand.dtype)


def _remember_shapes(tl: Any) -> None:
    """Lets types of blocks and tensors look up what they would compute from the same shape each time."""
    begin_block, begin_tensor = tl.block_type.__init__, tl.tensor.__init__

    def init_block(block: Any, element: Any, shape: Any) -> None:
        known = vars(element).setdefault("known_blocks", {})  # what was computed for blocks of this type, by shape
        sizes = tuple(size.value if type(size) is tl.constexpr else size for size in shape)
        if sizes not in known:
            begin_block(block, element, shape)
            known[sizes] = dict(vars(block))
        vars(block).update(known[sizes])

    def init_tensor(tensor: Any, handle: Any, of: Any) -> None:
        if "known_tensor" not in vars(of):
            begin_tensor(tensor, handle, of)
            of.known_tensor = {name: value for name, value in vars(tensor).items() if name not in ("handle", "type")}
            if of.is_block():
                of.element_ty.known_blocks[tuple(of.shape)]["known_tensor"] = of.known_tensor
        vars(tensor).update(of.known_tensor, handle=handle, type=of)

    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor


class _KnownTypes:
    """NumPy's types of Triton's types. The interpreter builds a table of them for each look-up."""

    def __init__(self, look_up: Callable[[Any], Any]) -> None:
        self._look_up = look_up
        self._known: dict[str, Any] = {}

    def __call__(self, triton_type: Any) -> Any:
        scalar = triton_type.scalar
        if scalar.is_ptr():
            return np.dtype(np.uint64)
        if scalar.name not in self._known:
            self._known[scalar.name] = self._look_up(scalar)
        return self._known[scalar.name]


class _Language:
    """Replaces the functions of triton.language during a launch.

    The interpreter would look for them again in each launch, and in each call of a device function. Its `__index__`
    of a tensor calls int() on an array of one number, which NumPy 2.4 refuses.
    """

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._find = interpreter, interpreter._patch_lang
        self._found: dict[tuple[object, str], object] = {}  # (owner, name) → what is there during a launch
        self._scope: Any = None  # what the launch replaced; None between launches

    def __call__(self, kernel: object) -> "_Language":
        """Begins a launch, or a call of a device function in it, for which everything is replaced already."""
        if self._scope is None:
            self._scope = self._interpreter._LangPatchScope()
            self._found = self._found or self._all_replaced()
            for (owner, name), value in self._found.items():
                self._scope.set_attr(owner, name, value)
        return self

    def restore(self) -> None:
        """Ends a launch."""
        self._scope.restore()
        self._scope = None

    def _all_replaced(self) -> dict[tuple[object, str], object]:
        tl = self._interpreter.tl
        scope = self._find(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        scope.set_attr(tl.tensor, "__index__", lambda tensor: tensor.handle.data.item())
        found = {(owner, name): vars(owner)[name] for owner, name, _ in scope._changes}
        scope.restore()
        return found
