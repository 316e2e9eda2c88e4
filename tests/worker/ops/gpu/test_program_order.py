"""Runs every kernel in other orders of its programs, and checks each memory access: see adverse.py."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.worker.ops.harness.adverse import Order, adverse
from tests.worker.ops.harness.cases import batch, poisoned, random, rope_tables
from tests.worker.ops.harness.gpu_experts import PLAIN, Format, experts_on_triton, layer_of
from tests.worker.ops.harness.quantized import quantized, with_scales
from tests.worker.ops.harness.recurrent import slots
from tests.worker.ops.harness.sampling import Row, params_of
from tests.worker.ops.harness.triton_files import TRITON_FILES
from worker.ops.launch_options import GpuOptions
from worker.ops.linear.packed_codes import pack_codes
from worker.ops.quantized_weight import E2M1, INT4, INT8, NF4, Kind, quantize
from worker.ops.recurrent.reference import DeltaNetWeights, Mamba2Weights
from worker.ops.recurrent_state import NO_STATE, DeltaNetShape, Mamba2Shape, RecurrentState, ShortConvShape
from worker.spec import RecurrentShape

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="about what the interpreter hides"),
    pytest.mark.filterwarnings("ignore:overflow encountered in"),
]
HALF = torch.float16
Run = Callable[[], Iterable[Tensor]]


def strided(tokens: int, width: int, seed: int = 0) -> Tensor:
    """Returns columns in the middle of a wider tensor, at an odd address."""
    return random(tokens, 3 * width + 1, dtype=HALF, seed=seed)[:, width + 1 : 2 * width + 1]


def norms() -> Iterable[Tensor]:
    from worker.ops.norm.triton import add_rms_norm_triton, rms_norm_triton

    weight, residual = random(70, dtype=HALF, seed=1), random(5, 70, dtype=HALF, seed=2)
    yield rms_norm_triton(strided(5, 70), weight, 1e-6, offset=False)
    yield rms_norm_triton(strided(5, 3 * 24).unflatten(1, (3, 24)), random(24, dtype=HALF), 1e-6, offset=True)
    yield from add_rms_norm_triton(random(5, 70, dtype=HALF), residual, weight, 1e-6, offset=True, x_norm=weight)
    yield from add_rms_norm_triton(random(3, 5, 70), residual, weight, 1e-6, offset=False)


# sequences without a row, with one row and with several: one begins, one continues; a state is read twice
SLOTS = slots([NO_STATE, 1, 1, 2], [3, 4, 5, 0], [0, 3, 4, 8, 8])


def random_state(shape: RecurrentShape) -> RecurrentState:
    state = RecurrentState.zeros(shape, 6, HALF, torch.device("cpu"))
    state.memory.normal_(generator=torch.Generator().manual_seed(0))
    state.tail.normal_(generator=torch.Generator().manual_seed(1))
    return state


def states() -> Iterable[Tensor]:
    from worker.ops.recurrent.triton import delta_net_triton

    shape = DeltaNetShape(key_heads=2, value_heads=4, key_dim=12, value_dim=40, taps=3)
    weights = DeltaNetWeights(
        random(3, shape.channels), -random(4, seed=1).abs(), random(4, seed=2), random(40, dtype=HALF, seed=3)
    )
    state = random_state(shape)
    yield delta_net_triton(
        random(8, sum(shape.projected), dtype=HALF), random(8, 8, dtype=HALF), weights, shape, state, SLOTS, 1e-6,
    )  # fmt: skip
    yield from (state.memory, state.tail)


def scans() -> Iterable[Tensor]:
    from worker.ops.recurrent.triton import mamba2_triton

    shape = Mamba2Shape(heads=4, head_dim=40, groups=2, state_size=12, taps=3)
    small = (random(3, shape.channels), random(shape.channels), -random(4, seed=1).abs(), random(4), random(4, seed=2))
    state = random_state(shape)
    yield mamba2_triton(
        random(8, sum(shape.projected), dtype=HALF), random(8, 4, dtype=HALF),
        Mamba2Weights(*small, random(160, dtype=HALF, seed=3)), shape, state, SLOTS, 1e-6,
    )  # fmt: skip
    yield from (state.memory, state.tail)


def convolutions() -> Iterable[Tensor]:
    from worker.ops.recurrent.triton import short_conv_triton

    shape = ShortConvShape(channels=40, taps=3)
    state = random_state(shape)
    yield short_conv_triton(random(8, 120, dtype=HALF), random(3, 40), state, SLOTS)
    yield state.tail


def gates() -> Iterable[Tensor]:
    from worker.ops.activation.triton import act_and_mul_triton, activate_triton, output_gate_triton

    yield output_gate_triton(random(3, 700, dtype=HALF), random(3, 700, dtype=HALF, seed=1))
    yield act_and_mul_triton(random(3, 2 * 1500, dtype=HALF), "silu")
    yield act_and_mul_triton(random(1, 2 * 3, dtype=HALF), "gelu_tanh")
    yield activate_triton(random(3, 1500, dtype=HALF), "xielu", random(4).abs())


def writes() -> Iterable[Tensor]:
    from worker.ops.rope.triton import rotary_triton, store_kv_triton

    positions, slots = torch.tensor([0, 9, 3]), torch.tensor([7, 4, 8])
    q, k = (strided(3, heads * 24).unflatten(1, (heads, 24)) for heads in (3, 1))
    yield from rotary_triton(q, k, *rope_tables(10, 24), positions)
    for dtype in (HALF, torch.float8_e4m3fn):
        caches = [torch.zeros(3, 4, 1, 24).to(dtype) for _ in "kv"]
        store_kv_triton(k, k, *caches, slots)
        yield from caches


def heads() -> Iterable[Tensor]:
    from worker.ops.rope.triton import qkv_rope_write_triton

    positions, slots = torch.tensor([0, 9, 3]), torch.tensor([7, 4, 8])
    norm = random(24, dtype=HALF)
    for qkv, dtype in ((strided(3, 13 * 24), HALF), (random(2, 3, 13 * 24), torch.float8_e4m3fn)):
        caches = [torch.zeros(3, 4, 5, 24).to(dtype) for _ in "kv"]
        yield qkv_rope_write_triton(
            qkv, *caches, *rope_tables(10, 24), positions, slots,
            q_norm=norm, k_norm=norm, eps=1e-6, offset=True, dtype=HALF,
        )  # fmt: skip
        yield from caches


def products() -> Iterable[Tensor]:
    from worker.ops.linear.triton import linear_triton

    shapes = ((1, 48, 70), (20, 130, 256), (70, 130, 72), (3, 64, 700), (130, 128, 64))
    kinds: tuple[Kind, ...] = ("int8", "fp8")
    for at, (rows, columns, depth) in enumerate(shapes):
        x, weight = strided(rows, depth), random(columns, depth, dtype=HALF, seed=1)
        bias = random(columns, dtype=HALF, seed=2)
        yield linear_triton(x, weight, bias)
        yield linear_triton(x, weight, None, split_k=True)
        yield linear_triton(x, weight, None, fp32_out=True)
        values, scale = quantize(weight, kinds[at % 2])
        yield linear_triton(x, values, bias, scale)
        yield linear_triton(x, values, bias, scale, dynamic=True)
        yield linear_triton(x, values, None, scale, dynamic=True, split_k=True)


def spilled_products() -> Iterable[Tensor]:
    """Yields a product with three tiles in two programs."""
    from worker.ops.linear.triton import linear_triton
    from worker.ops.linear.triton_tiles import Tile

    weight, bias = random(70, 800, dtype=HALF, seed=1), random(70, dtype=HALF, seed=2)
    with patch("worker.ops.linear.triton_accumulate.multiprocessors", lambda device: 2):
        yield linear_triton(strided(33, 800), weight, bias, tile=Tile(16, 128, 4, 1, "spilled"))


def gated_products() -> Iterable[Tensor]:
    from worker.ops.linear.triton import gated_linear_triton

    for rows in (1, 33, 70):
        x, weight = strided(rows, 100), random(2 * 90, 100, dtype=HALF, seed=1)
        yield gated_linear_triton(x, weight, None, "silu")
        values, scale = quantize(weight, "int8")
        yield gated_linear_triton(x, values, random(180, dtype=HALF), "gelu_tanh", scale)
        yield gated_linear_triton(x, values, None, "silu", scale, dynamic=True)


def quantized_products() -> Iterable[Tensor]:
    from worker.ops.linear.triton_low_bit import quantized_gated_linear_triton, quantized_linear_triton

    for rows, columns, depth in ((1, 48, 70), (20, 130, 256), (70, 129, 72), (3, 64, 700)):
        x, bias = strided(rows, depth), random(columns, dtype=HALF, seed=2)
        parts = [quantized(INT4, columns - 30, depth, 16, minimum=True), quantized(INT8, 30, depth, 128)]
        packed = [pack_codes(part) for part in parts]
        yield quantized_linear_triton(x, packed, bias)
        yield quantized_linear_triton(x, packed, None, split_k=True)
        yield quantized_linear_triton(x, [pack_codes(quantized(NF4, columns, depth, 64))], bias, fp32_out=True)
    for rows in (1, 33, 70):
        x, bias = strided(rows, 100), random(2 * 192, dtype=HALF, seed=2)
        gate_up = with_scales(quantized(E2M1, 2 * 192, 100, 32, minimum=True), torch.float32)
        yield quantized_gated_linear_triton(x, pack_codes(gate_up), bias, "silu")


def unpacked_weights() -> Iterable[Tensor]:
    from worker.ops.linear.triton_unpack import unpack_triton

    parts = (
        quantized(INT4, 99, 300, 16, minimum=True), quantized(INT8, 30, 300, 128), quantized(NF4, 5, 300, 64),
        with_scales(quantized(E2M1, 7, 300, 32, minimum=True), torch.float32),
    )  # fmt: skip
    yield unpack_triton([pack_codes(part) for part in parts], HALF)


def attentions() -> Iterable[Tensor]:
    """Yields runs of attention of many kinds. Few splits are merged at once, which is faster in the interpreter."""
    from worker.ops.attention import triton as attention
    from worker.ops.launch_options import GpuOptions

    for lengths in ([(1, 37), (17, 90), (1, 1), (3, 300)], [(1, 700)]):
        for group, size, page, window in ((2, 24, 16, 0), (3, 64, 1, 24), (1, 32, 256, 300)):
            case = batch(lengths, 2 * group, 2, size, page, HALF)
            fused = torch.cat((case.q, case.q), dim=1)[:, : 2 * group]
            given = fused, case.cache_k, case.cache_v, case.query_start_loc, case.seq_lens, case.page_table
            more = {"sinks": random(2 * group), "softcap": 3.0}
            for extra in ({}, more):
                # only sequences of one row are split
                with patch.multiple(attention, PARTIAL_BYTES=0, SPLITS_AT_ONCE=2):
                    yield attention.attention_triton(
                        *given, case.max_kv_len + 40, scale=0.2, window=window, **extra
                    )  # fmt: skip
    case = batch([(1, 400), (3, 300)], 4, 2, 24, 16, HALF)
    arrivals = torch.zeros(16, dtype=torch.int32)
    lengths_of = torch.tensor([0, 1, 4, 4, 4], dtype=torch.int32), torch.tensor([400, 300, 0, 0], dtype=torch.int32)
    for options in (GpuOptions(), GpuOptions(last_combine=True, arrivals=arrivals)):
        with patch.multiple(attention, SPLITS_AT_ONCE=2):
            yield attention.attention_triton(
                case.q, case.cache_k, case.cache_v, *lengths_of, case.page_table[[0, 1, 0, 0]], 400,
                scale=0.2, window=0, options=options,
            )  # fmt: skip
    yield arrivals


def products_with_norms() -> Iterable[Tensor]:
    from worker.ops.linear.triton_fused import linear_add_norm_triton

    options = GpuOptions(fused_norms=True).on(torch.device("cpu"))
    weight, norm = random(70, 1030, dtype=HALF, seed=1), random(70, dtype=HALF, seed=2)
    for rows, after in ((1, None), (2, norm)):
        yield from linear_add_norm_triton(
            strided(rows, 1030), weight, random(70, dtype=HALF), random(rows, 70, dtype=HALF, seed=3), norm, 1e-6,
            offset=False, x_norm=after, scale=0.5, options=options,
        )  # fmt: skip
    assert options.arrivals is not None
    yield options.arrivals


def prefetches() -> Iterable[Tensor]:
    from worker.ops.linear.triton_fused import _prefetch_kernel

    weight = random(3, 5)
    _prefetch_kernel[(2,)](weight, weight.numel(), BYTES=128)
    yield weight


# Matrices of two adapters, which the kernels find by addresses in tables. The first adapter has two parts, the second
# has one and an empty part without columns. A part: B, its first rank, number of ranks, its first column.
FACTORS = torch.linspace(0.5, 1.5, 90)
B = tuple(random(*shape, dtype=HALF) for shape in ((70, 64), (20, 32), (90, 32), (0, 0)))
ADAPTERS = (
    (random(43, 70, dtype=HALF, seed=2), ((B[0], 0, 40, 0), (B[1], 40, 3, 70))),
    (random(8, 70, dtype=HALF, seed=3), ((B[2], 0, 8, 0), (B[3], 0, 0, 90))),
)
REACHED = (FACTORS, *(a for a, _ in ADAPTERS), *B[:3])


def adapters() -> Iterable[Tensor]:
    from worker.lora.triton import add_products_triton, part_table, tiles_of

    y = random(20, 90, dtype=HALF, seed=1)
    tiles = tiles_of([torch.tensor([19, 0, 3]), torch.tensor([1, 2, *range(4, 19)])], [0.5, 2.0])
    tables = [part_table(a, FACTORS, parts) for a, parts in ADAPTERS]
    add_products_triton(y, strided(20, 70), tiles, tables, 43)
    yield y


def samples() -> Iterable[Tensor]:
    from worker.ops.sampling.reference import EVERY
    from worker.ops.sampling.triton import sample_triton

    logits = random(9, 501)[:, :500] * 3
    logits[3], logits[4, 5], logits[5, ::2], logits[6] = -torch.inf, torch.nan, -torch.inf, 1.0
    wishes = [
        Row(temperature=0), Row(top_k=40), Row(top_p=0.5, min_p=0.1), Row(top_k=9), Row(top_p=0.3), Row(),
        Row(top_k=300), Row(top_p=0.99, top_k=200), Row(top_k=1),
    ]  # fmt: skip
    for sizes in (
        {"part_size": 128, "max_one_pass": 16, "max_listed": 256},
        {"part_size": 512, "max_one_pass": 0, "max_listed": 3},
    ):
        yield sample_triton(logits, params_of(wishes).plain, EVERY, **sizes)


def experts() -> Iterable[Tensor]:
    """Yields runs of experts. Inputs and weights are strided, rows share experts; few rows are not grouped."""
    for at, format in enumerate((PLAIN, Format(kind="int8"), Format(kind="fp8", dynamic=True), Format(INT4, 32))):
        layer = layer_of(5, 70, 64 if at % 2 else 40, format, dtype=HALF, bias=at % 2 == 0)
        layer = replace(layer, loads=torch.zeros(5, dtype=torch.int64))
        for rows in (1, 9):
            add, gate = strided(rows, 70, seed=3), random(rows, 1)
            yield experts_on_triton(strided(rows, 70), layer, 2, "silu", normalized=True, add=add, add_gate=gate)
            assert layer.loads is not None
            yield layer.loads
    layer = layer_of(5, 70, 40, Format(E2M1, 32), dtype=HALF)
    yield experts_on_triton(strided(7, 70), layer, 5, "clamped_swiglu", normalized=False)


KERNELS: dict[Run, set[str]] = {
    norms: {"_rms_norm_kernel"},
    states: {"_advance_kernel", "_gated_norm_kernel"},
    convolutions: {"_short_conv_kernel"},
    scans: {"_scan_kernel", "_norm_gated_kernel"},
    gates: {"_act_and_mul_kernel", "_activate_kernel", "_output_gate_kernel"},
    writes: {"_rotary_kernel", "_store_kv_kernel"},
    heads: {"_qkv_rope_write_kernel"},
    products: {"_linear_kernel", "_quantize_tokens_kernel"},
    spilled_products: {"_spilled_linear_kernel"},
    products_with_norms: {"_linear_norm_kernel"},
    prefetches: {"_prefetch_kernel"},
    adapters: {"_multiply_a_kernel", "_add_b_kernel"},
    gated_products: {"_gated_linear_kernel", "_quantize_tokens_kernel"},
    quantized_products: {"_quantized_gated_linear_kernel", "_quantized_linear_kernel"},
    unpacked_weights: {"_unpack_kernel"},
    attentions: {"_combine_kernel", "_split_kernel", "_prefill_kernel"},
    experts: {
        "_linear_kernel", "_quantize_tokens_kernel", "_act_and_mul_kernel", "_choose_experts_kernel",
        "_group_slots_kernel", "_count_loads_kernel", "_combine_experts_kernel", "_grouped_linear_kernel",
        "_grouped_gated_linear_kernel", "_quantized_grouped_linear_kernel", "_quantized_grouped_gated_linear_kernel",
    },
    samples: {
        "_collect_kernel", "_count_kernel", "_weight_sum_kernel", "_max_kernel", "_draw_kernel", "_limit_kernel",
    },
}  # fmt: skip


# Programs of these launches communicate by atomics, so they run in every order. For other launches, one order is
# enough, because `adverse` shows that no program reads what another program writes.
ATOMIC: dict[Run, str] = {
    attentions: "attention/triton_split.py", experts: "moe/triton_routing.py",
    products_with_norms: "linear/triton_fused.py", samples: "sampling/triton_top_k_top_p.py",
}  # fmt: skip


@pytest.mark.parametrize("run", KERNELS, ids=lambda run: run.__name__)
def test_kernel_bits_do_not_depend_on_program_order_or_neighbours(run: Run) -> None:
    expected = list(run())
    for order in get_args(Order) if run in ATOMIC else ("backwards",):
        with poisoned(), adverse(order, REACHED) as launched:
            got = list(run())
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), order
        assert launched == KERNELS[run]


def test_program_order_covers_every_kernel() -> None:
    sources = {"/".join(file.parts[-2:]): file.read_text() for file in TRITON_FILES}
    kernels = {
        line.split("(")[0].removeprefix("def ")
        for source in sources.values()
        for line in source.splitlines()
        if line.startswith("def _") and "_kernel(" in line
    }
    assert set(ATOMIC.values()) == {name for name, source in sources.items() if "tl.atomic" in source}
    assert set().union(*KERNELS.values()) == kernels and len(kernels) > 10


@triton.jit
def _load_beyond(x_ptr, y_ptr, size):
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 8)), axis=0))


@triton.jit
def _load_what_another_stores(x_ptr, y_ptr, size):
    program = tl.program_id(0)
    tl.store(y_ptr + program, tl.load(y_ptr + (program + 1) % size))


@triton.jit
def _load_what_it_stores(x_ptr, y_ptr, size):
    at = tl.program_id(0)
    tl.store(y_ptr + at, tl.load(x_ptr + 3 * at))
    tl.store(x_ptr + 3 * at, tl.load(y_ptr + at))


@triton.jit
def _load_what_it_stored(x_ptr, y_ptr, size):
    at = tl.program_id(0)
    tl.store(y_ptr + at, tl.load(x_ptr + 3 * at))
    tl.debug_barrier()
    tl.store(y_ptr + at, 1 + tl.load(y_ptr + at))


@triton.jit
def _store_what_another_stores(x_ptr, y_ptr, size):
    tl.store(y_ptr, 1.0)


@triton.jit
def _count_before_all_threads_stored(x_ptr, y_ptr, size, BARRIER: tl.constexpr = False):
    tl.store(y_ptr + 1 + tl.program_id(0), 1.0)
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(y_ptr, 1.0, sem="acq_rel") == size - 1:
        tl.store(x_ptr, tl.load(y_ptr + 1) + tl.load(y_ptr + 2) + tl.load(y_ptr + 3))


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (_load_beyond, "outside"), (_load_what_another_stores, "not ordered"), (_load_what_it_stores, "not ordered"),
        (_store_what_another_stores, "not ordered"), (_count_before_all_threads_stored, "not ordered"),
    ],
)  # fmt: skip
def test_adverse_interpreter_reports_faults(kernel: Any, fault: str) -> None:
    x = random(20)
    with adverse("backwards"), pytest.raises(Exception, match=fault):  # the interpreter wraps the Fault
        kernel[(3,)](x[::3], random(4).zero_(), 3)


def test_adverse_interpreter_orders_a_program_at_its_barriers() -> None:
    x, y = random(20), random(3)
    with adverse("backwards"), pytest.raises(Exception, match="not ordered"):
        _load_what_it_stored[(3,)](x[::3], y, 3)


def test_adverse_interpreter_orders_programs_at_their_atomics() -> None:
    x, y = random(1), torch.zeros(4)
    with adverse("backwards"):
        _count_before_all_threads_stored[(3,)](x, y, 3, BARRIER=True)
    assert x.tolist() == [3.0] and y.tolist() == [3.0, 1.0, 1.0, 1.0]


FAR = (1 << 31) + (1 << 20)  # number of elements, beyond 32-bit offsets; unwritten memory costs nothing


def test_attention_triton_handles_a_cache_beyond_32_bit_offsets() -> None:
    from worker.ops.attention.triton import attention_triton
    from worker.ops.rope.triton import qkv_rope_write_triton, store_kv_triton

    page, size = 16, 64
    shape = (FAR // (page * size), page, 1, size)
    cache_k, cache_v = (torch.empty(shape, dtype=torch.float8_e4m3fn) for _ in "kv")
    k = random(3, 1, size, dtype=HALF).to(cache_k.dtype).to(HALF)
    slots = (shape[0] - 1) * page + torch.arange(3)
    qkv = torch.cat((k, k, k), dim=1).flatten(1)
    where = torch.ones(20, size), torch.zeros(20, size), torch.arange(3), slots
    with adverse("shuffled"):
        store_kv_triton(k, k, cache_k, cache_v, slots)
        assert torch.equal(cache_k.flatten(0, 1)[slots[0] :][:3].to(HALF), k)
        qkv_rope_write_triton(
            -qkv, cache_k, cache_v, *where, q_norm=None, k_norm=None, eps=1e-6, offset=False, dtype=HALF
        )  # fmt: skip
        assert torch.equal(cache_v.flatten(0, 1)[slots[0] :][:3].to(HALF), -k)
        seen = attention_triton(
            k, cache_k, cache_v, torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32),
            torch.tensor([[shape[0] - 1]], dtype=torch.int32), 3, scale=0.1, window=0,
        )  # fmt: skip
    assert torch.equal(seen[0], -k[0])


def test_rows_farther_apart_than_32_bits_count() -> None:
    from worker.ops.linear.triton import linear_triton
    from worker.ops.norm.triton import rms_norm_triton
    from worker.ops.sampling.reference import EVERY
    from worker.ops.sampling.triton import sample_triton

    weight, wishes = random(16, 64), params_of([Row(), Row(top_k=3, top_p=0.9), Row(temperature=0)]).plain
    runs: list[tuple[int, Callable[[Tensor], Tensor]]] = [
        (3, lambda x: rms_norm_triton(x, weight[0], 1e-6, offset=False)),
        (3, lambda x: sample_triton(x, wishes, EVERY, part_size=32)),
        (300, lambda x: linear_triton(x, weight, None)),
    ]
    for rows, run in runs:
        near = random(rows, 64)
        far = torch.empty(FAR + 64).as_strided((rows, 64), (FAR // (rows - 1), 1))
        far.copy_(near)
        with adverse("shuffled"):
            assert torch.equal(run(far), run(near))
