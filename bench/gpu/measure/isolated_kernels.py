"""Kernels alone, on inputs larger than caches: how near each comes to what the device can."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.checks.cases import wanted
from bench.gpu.checks.random_inputs import EPS, Fresh
from bench.gpu.context import Place, Row, spec_of
from bench.gpu.setup.harness import PAGE_SIZE
from bench.gpu.setup.roofline import attention_operations
from bench.gpu.setup.steps import last, packed, sequences
from worker.kernels.act_and_mul import act_and_mul
from worker.kernels.attention import attention
from worker.kernels.linear import PackedLinear, gated_linear, linear, pack, pack_quantized
from worker.kernels.norm import add_rms_norm
from worker.kernels.qkv_rope_write import qkv_rope_write
from worker.kernels.quantize import Scheme, quantize
from worker.kernels.sample import sample_plain
from worker.model.spec import ModelSpec

SPREAD = 256 << 20  # bytes of different weights in turn: more than a cache holds
WAYS = ("invariant", "library", "int8", "fp8")  # the last two, a Scheme's names, with eight-bit weights
FEW = 512  # rows up to which a product is bound by reading its weight


@torch.inference_mode()
def attention_alone(place: Place, model: str) -> Iterator[Row]:
    spec = spec_of(model)
    count, keys = place.sizes.attention
    call, moved = _attend(place, spec, [keys] * count, 1)
    seconds = place.clock.seconds(call)
    what: Row = {"heads of": model, "what": f"decode, {count} x {keys}"}
    share = place.share_of_copy(moved, seconds)
    yield what | {"ms": 1e3 * seconds, "rate": moved / seconds / 1e9, "unit": "GB/s", "%": share}
    tokens = place.sizes.prompt
    call, _ = _attend(place, spec, [tokens], tokens)
    yield _prefilled(place, spec, model, f"prefill, {tokens}", place.clock.seconds(call))
    yield _prefilled(place, spec, model, f"prefill, {tokens}, torch's own", place.clock.seconds(_dense(place, spec)))


def _prefilled(place: Place, spec: ModelSpec, model: str, what: str, seconds: float) -> Row:
    work = attention_operations(spec.heads, spec.head_dim, place.sizes.prompt)
    share = place.share_of_gemm(work, seconds)
    rate = work / seconds / 1e12
    return {"heads of": model, "what": what, "ms": 1e3 * seconds, "rate": rate, "unit": "TFLOP/s", "%": share}


def _attend(place: Place, spec: ModelSpec, lengths: list[int], rows: int) -> tuple[Callable[[], Tensor], int]:
    """A call of the kernel over scattered pages, no window; and the bytes of the keys and values it reads."""
    fresh = Fresh(place)
    made, pool = sequences(lengths, PAGE_SIZE, 100, place.seed)
    step = packed([last(one, rows) for one in made], PAGE_SIZE, place.device)
    k, v = (fresh(pool, PAGE_SIZE, spec.kv_heads, spec.head_dim) for _ in "kv")
    q = fresh(len(step.token_ids), spec.heads, spec.head_dim)
    moved = 2 * sum(lengths) * spec.kv_heads * spec.head_dim * place.dtype.itemsize
    return lambda: attention(
        q, k, v, step.query_start_loc, step.seq_lens, step.page_table, step.max_kv_len,
        scale=spec.attention_scale, window=0,
    ), moved  # fmt: skip


def _dense(place: Place, spec: ModelSpec) -> Callable[[], Tensor]:
    """Keys and values side by side, in the order that torch likes."""
    fresh, tokens = Fresh(place), place.sizes.prompt
    q = fresh(1, spec.heads, tokens, spec.head_dim)
    k, v = (fresh(1, spec.kv_heads, tokens, spec.head_dim) for _ in "kv")
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@torch.inference_mode()
def linear_alone(place: Place, model: str) -> Iterator[Row]:
    spec = spec_of(model)
    for name, (n, k) in _products(spec).items():
        for rows in place.sizes.rows if name != "head" else place.sizes.rows[:-1]:
            if late := place.short(3):
                yield {"model": model, "weight": name, "rows": rows, "note": late}
                continue
            ways = WAYS if name != "head" else WAYS[:2]
            found = {way: _product(place, spec, name, rows, way) for way in ways}
            few = rows <= FEW
            share, work = (place.share_of_copy, n * k * 2) if few else (place.share_of_gemm, 2 * n * k * rows)
            eight = work // 2 if few else work
            yield {
                "model": model, "weight": f"{name} {n} x {k}", "rows": rows,
                "µs invariant": 1e6 * found["invariant"], "%": share(work, found["invariant"]),
                "µs library": 1e6 * found["library"], "% library": share(work, found["library"]),
                **{f"µs {way}": 1e6 * found[way] for way in ways[2:]},
                **{f"% {way}": share(eight, found[way]) for way in ways[2:]},
                "of": "copy" if few else "GEMM",
            }  # fmt: skip


def _products(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """[N, K] of each weight."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return {
        "qkv": (spec.qkv_size, hidden), "o": (hidden, spec.heads * spec.head_dim), "gate_up": (2 * inner, hidden),
        "down": (hidden, inner), "head": (spec.vocab_size, hidden),
    }  # fmt: skip


def _product(place: Place, spec: ModelSpec, name: str, rows: int, way: str) -> float:
    """Seconds of one as the decoder asks for it, several weights in turn."""
    fresh, (n, k) = Fresh(place), _products(spec)[name]
    spread = SPREAD if place.cuda else 1
    size = 2 if way in WAYS[:2] else 1
    weights = [_packed(place, fresh(n, k), way) for _ in range(min(16, 1 + spread // (n * k * size)))]
    x = fresh(rows, k)

    def run() -> None:
        for weight in weights:
            if name == "gate_up":
                gated_linear(x, weight, spec.activation)
            else:
                linear(x, weight, fp32_out=name == "head", split_k=name != "head")

    return place.clock.seconds(run) / len(weights)


def _packed(place: Place, weight: Tensor, way: str) -> PackedLinear:
    if way in WAYS[:2]:
        return pack(weight, invariant=way == "invariant")
    scheme = Scheme.of(way)
    eight = quantize(weight, scheme.kind)
    return pack_quantized(*eight, dtype=place.dtype, invariant=True, dynamic=scheme.dynamic)


@torch.inference_mode()
def layer_alone(place: Place, spec: ModelSpec, rows: int, way: str) -> float:
    """Seconds of all products of a layer; `way` as in WAYS, or another name of a Scheme."""
    return sum(_product(place, spec, name, rows, way) for name in _products(spec) if name != "head")


@torch.inference_mode()
def kernels_alone(place: Place, model: str) -> Iterator[Row]:
    spec = spec_of(model)
    for rows in place.sizes.rows:
        for name, (call, moved) in _small(place, spec, rows).items():
            seconds = place.clock.seconds(call)
            share = place.share_of_copy(moved, seconds)
            yield {"kernel": name, "rows": rows, "µs": 1e6 * seconds, "MB": moved / 1e6, "% of floor": share}


def _small(place: Place, spec: ModelSpec, rows: int) -> dict[str, tuple[Callable[[], object], int]]:
    """A call and the bytes it must move, of everything but products and attention."""
    fresh, size = Fresh(place), place.dtype.itemsize
    x, residual, weight = fresh(rows, spec.hidden_size), fresh(rows, spec.hidden_size), fresh(spec.hidden_size)
    wide, qkv = fresh(rows, 2 * spec.intermediate_size), fresh(rows, spec.qkv_size)
    pool = -(-rows // PAGE_SIZE) + 1
    k, v = (fresh(pool, PAGE_SIZE, spec.kv_heads, spec.head_dim) for _ in "kv")
    cos, sin = (fresh(rows, spec.head_dim, dtype=torch.float32) for _ in "cs")
    positions, slots = fresh.ids(rows, rows), fresh.ids(rows, pool * PAGE_SIZE)
    norms = (fresh(spec.head_dim), fresh(spec.head_dim)) if spec.qk_norm else (None, None)
    found: dict[str, tuple[Callable[[], object], int]] = {
        "add + norm": (lambda: add_rms_norm(x, residual, weight, EPS, offset=spec.norm_offset), 4 * x.nbytes),
        "gate": (lambda: act_and_mul(wide, spec.activation), wide.nbytes * 3 // 2),
        "norm of heads, rotary, K/V write": (
            lambda: qkv_rope_write(
                qkv, k, v, cos, sin, positions, slots, q_norm=norms[0], k_norm=norms[1], eps=EPS,
                offset=spec.norm_offset, dtype=place.dtype,
            ),
            2 * rows * spec.qkv_size * size + cos.nbytes + sin.nbytes,
        ),
    }  # fmt: skip
    if rows <= FEW:
        logits = fresh(rows, spec.vocab_size, dtype=torch.float32)
        greedy, drawn = (wanted(rows, kind, place.device) for kind in ((0.0, 0, 1.0, 0.0), (0.8, 0, 0.95, 0.0)))
        found["sample, greedy"] = (lambda: sample_plain(logits, *greedy), logits.nbytes)
        found["sample, temperature and top-p"] = (lambda: sample_plain(logits, *drawn), logits.nbytes)
    return found
