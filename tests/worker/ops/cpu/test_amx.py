"""The emulated AMX (harness/emulated_amx.py) follows Intel's manual, and the AMX tier is correct on it."""

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness import emulated_amx
from tests.worker.ops.harness.cpu_tiers import CAN_EMULATE, EMULATED, HERE, use
from worker.ops.linear import native as linear_native
from worker.ops.linear.native import pack_weight
from worker.ops.native_build import OF_X86

AMX = OF_X86.index("amx")

pytestmark = pytest.mark.skipif(not CAN_EMULATE, reason="needs AVX-512 with bf16")
TINY = 1e-39  # a denormal
Misuse = Callable[[], None]


class Shapes(ctypes.Structure):
    _fields_ = [
        ("palette", ctypes.c_uint8), ("start_row", ctypes.c_uint8), ("reserved", ctypes.c_uint8 * 14),
        ("bytes", ctypes.c_uint16 * 16), ("rows", ctypes.c_uint8 * 16),
    ]  # fmt: skip


def shape(*tiles: tuple[int, int], palette: int = 1) -> None:
    """Configures the emulated tiles. tiles: (rows, bytes per row) of each tile"""
    shapes = Shapes(palette=palette)
    for i, (rows, size) in enumerate(tiles):
        shapes.rows[i], shapes.bytes[i] = rows, size
    emulated_amx.library().emulated_configure(ctypes.byref(shapes))


def load(tile: int, x: Tensor) -> None:
    assert x.stride(1) == 1
    stride = ctypes.c_long(x.stride(0) * x.element_size())
    emulated_amx.library().emulated_load(tile, ctypes.c_void_p(x.data_ptr()), stride)


def stored(tile: int, rows: int, columns: int) -> Tensor:
    out = torch.full((rows, columns), float("nan"))
    emulated_amx.library().emulated_store(tile, ctypes.c_void_p(out.data_ptr()), ctypes.c_long(4 * columns))
    return out


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    """Emulates a processor with AMX whose operating system has granted its use."""
    emulated_amx.library().emulated_machine(1, 1)
    assert emulated_amx.library().supports(AMX)
    emulated_amx.fault()
    yield
    emulated_amx.library().emulated_release()
    emulated_amx.library().emulated_machine(1, 1)
    assert emulated_amx.library().supports(AMX)
    assert not emulated_amx.fault()


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows, pairs, columns", [(16, 16, 16), (1, 16, 16), (5, 3, 7)])
def test_emulated_dot_sums_two_chains_from_zero(rows: int, pairs: int, columns: int) -> None:
    a, b = random(rows, 2 * pairs).bfloat16(), random(pairs, 2 * columns, seed=1).bfloat16()
    before, expected = random(rows, columns, seed=2), random(rows, columns, seed=2)
    shape((rows, 4 * columns), (rows, 4 * pairs), (pairs, 4 * columns))
    for tile, x in enumerate((before, a, b)):
        load(tile, x)
    emulated_amx.library().emulated_dot(0, 1, 2)
    chains = torch.zeros(2, rows, columns)
    for k in range(pairs):  # a product of two bf16 is exact in fp32, so adding it equals a fused multiply-add
        for odd, chain in enumerate(chains):
            chain += a[:, 2 * k + odd, None].float() * b[k, odd::2].float()
    assert torch.equal(stored(0, rows, columns), expected + (chains[0] + chains[1]))


def test_emulated_dot_flushes_denormals() -> None:
    shape((1, 4), (1, 4), (1, 4))
    for sum, left, right in [(0.0, TINY, 1e38), (TINY, 0.0, 0.0), (0.0, 1e-20, 1e-20)]:
        load(0, torch.tensor([[sum]]))
        load(1, torch.tensor([[left, left]], dtype=torch.bfloat16))
        load(2, torch.tensor([[right, right]], dtype=torch.bfloat16))
        emulated_amx.library().emulated_dot(0, 1, 2)
        assert stored(0, 1, 1).item() == 0.0
    assert torch.tensor([TINY]).mul(1.0).item() > 0.0, "the thread's own arithmetic is as it was"


def misuse_before_the_system_was_asked() -> None:
    emulated_amx.library().emulated_machine(1, 1)
    shape((16, 64))


def misuse_of_a_tile_without_a_shape() -> None:
    shape((16, 64))
    emulated_amx.library().emulated_zero(1)


def misuse_after_the_release() -> None:
    shape((16, 64))
    emulated_amx.library().emulated_release()
    load(0, torch.zeros(16, 16))


def misuse_of_shapes() -> None:
    shape((16, 64), (8, 64), (16, 64))
    emulated_amx.library().emulated_dot(0, 1, 2)


def misuse_of_one_tile_twice() -> None:
    shape((16, 64), (16, 64))
    emulated_amx.library().emulated_dot(0, 1, 1)


MISUSES: list[tuple[Misuse, str]] = [
    (misuse_before_the_system_was_asked, "not asked"),
    (lambda: shape((17, 64)), "out of range"),
    (lambda: shape((16, 68)), "out of range"),
    (lambda: shape((0, 64)), "out of range"),
    (lambda: shape(*[(16, 64)] * 9), "reserved"),
    (lambda: shape((16, 64), palette=2), "palette"),
    (misuse_of_a_tile_without_a_shape, "not configured"),
    (misuse_after_the_release, "not configured"),
    (misuse_of_shapes, "do not fit"),
    (misuse_of_one_tile_twice, "twice"),
]


@pytest.mark.parametrize("misuse, why", MISUSES)
def test_emulated_amx_reports_what_a_processor_would_reject(misuse: Misuse, why: str) -> None:
    misuse()
    assert why in emulated_amx.fault()
    assert not emulated_amx.fault()


def test_tier_without_amx_support_is_avx512bf16() -> None:
    for amx, granting in [(0, 1), (1, 0)]:
        emulated_amx.library().emulated_machine(amx, granting)
        assert not emulated_amx.library().supports(AMX)


@pytest.mark.parametrize("which", HERE[2:])
def test_every_processor_that_multiplies_bf16_gives_nearly_the_same(which: str) -> None:
    x, weight = random(70, 1000).bfloat16(), random(50, 1000, seed=1).bfloat16()
    exact = x.double() @ weight.double().T
    for rows in (1, 20, 70):
        with use(which):
            ours = linear_native.linear(x[:rows], pack_weight([weight], dtype=weight.dtype), out_dtype=torch.float32)
        torch.testing.assert_close(ours.double(), exact[:rows], rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows, most", [(1, 1.5), (16, 1.5), (17, 1.0), (32, 1.0), (48, 1.3), (512, 1.14)])
def test_gemm_amx_loads_tiles_about_once_per_product(rows: int, most: float) -> None:
    """A product uses two tiles of rows and two tiles of weights, so each weight is loaded once for up to 32 rows."""
    x, weight = random(rows, 512).bfloat16(), random(128, 512, seed=1).bfloat16()
    with use(EMULATED):
        packed = pack_weight([weight], dtype=weight.dtype)
        emulated_amx.counts()
        linear_native.linear(x, packed)
    made = emulated_amx.counts()
    assert made.dots == -(-rows // 16) * 16 * 8
    assert made.loads <= most * made.dots
