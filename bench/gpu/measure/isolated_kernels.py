"""Measures each kernel alone, on inputs larger than the caches, and compares it with the limits of the device."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.checks.cases import sampling_params
from bench.gpu.checks.random_inputs import EPS, RandomTensors
from bench.gpu.environment import Environment, Row, spec_of
from bench.gpu.measure.library_bits import compared, known_weights
from bench.gpu.setup.harness import PAGE_SIZE
from bench.gpu.setup.roofline import attention_operations
from bench.gpu.setup.steps import last, packed, sequences
from worker.ops.activation import act_and_mul
from worker.ops.attention import attention
from worker.ops.linear import gated_linear, linear
from worker.ops.linear.packed import PackedLinear, pack, pack_quantized, pack_stacked
from worker.ops.norm import add_rms_norm
from worker.ops.quantized_weight import INT4, Scheme, quantize, quantize_groups
from worker.ops.rope import qkv_rope_write
from worker.ops.sampling import sample_plain
from worker.spec import ModelSpec

MIN_TOTAL_BYTES = 256 << 20  # bytes of all weight copies that a measurement reads in turn: more than a cache holds
FULL = ("invariant", "library")
FEW_BITS = {"int8": 8, "fp8": 8, "int4": 4}  # Scheme name, or int4 (in groups of 128) → bits per weight
MAX_MEMORY_BOUND_ROWS = 512  # with more rows, a matrix product is no longer limited by reading its weight


@torch.inference_mode()
def attention_alone(env: Environment, model: str) -> Iterator[Row]:
    spec = spec_of(model)
    count, keys = env.sizes.attention
    call, bytes_moved = _attention_call(env, spec, [keys] * count, 1)
    seconds = env.clock.seconds_on_device(call)
    what: Row = {"heads of": model, "what": f"decode, {count} x {keys}"}
    share = env.share_of_copy(bytes_moved, seconds)
    yield what | {"ms": 1e3 * seconds, "rate": bytes_moved / seconds / 1e9, "unit": "GB/s", "%": share}
    yield from _uneven(env, spec, model)
    tokens = env.sizes.prompt
    call, _ = _attention_call(env, spec, [tokens], tokens)
    yield _prefilled(env, spec, model, f"prefill, {tokens}", env.clock.seconds_on_device(call))
    own = env.clock.seconds_on_device(_sdpa_call(env, spec))
    yield _prefilled(env, spec, model, f"prefill, {tokens}, torch's own", own)


def _uneven(env: Environment, spec: ModelSpec, model: str) -> Iterator[Row]:
    """Measures attention of a short chunk after a long prefix, and of a decode batch with one much longer sequence."""
    rows, prefix = env.sizes.turn
    count, keys, long = env.sizes.uneven
    calls = {
        f"{rows} tokens behind {prefix}": _attention_call(env, spec, [prefix + rows], rows),
        f"decode, {count} x {keys} and 1 x {long}": _attention_call(env, spec, [*[keys] * count, long], 1),
    }
    for what, (call, bytes_moved) in calls.items():
        seconds = env.clock.seconds_on_device(call)
        rate, share = bytes_moved / seconds / 1e9, env.share_of_copy(bytes_moved, seconds)
        yield {"heads of": model, "what": what, "ms": 1e3 * seconds, "rate": rate, "unit": "GB/s", "%": share}


def _prefilled(env: Environment, spec: ModelSpec, model: str, what: str, seconds: float) -> Row:
    work = attention_operations(spec.heads, spec.head_dim, env.sizes.prompt)
    share = env.share_of_gemm(work, seconds)
    rate = work / seconds / 1e12
    return {"heads of": model, "what": what, "ms": 1e3 * seconds, "rate": rate, "unit": "TFLOP/s", "%": share}


def _attention_call(
    env: Environment, spec: ModelSpec, lengths: list[int], rows: int
) -> tuple[Callable[[], Tensor], int]:
    """Returns a call of the attention kernel without a window, and the K/V bytes it reads. Pages are scattered."""
    random = RandomTensors(env)
    made, pool = sequences(lengths, PAGE_SIZE, 100, env.seed)
    step = packed([last(one, rows) for one in made], PAGE_SIZE, env.device)
    k, v = (random(pool, PAGE_SIZE, spec.kv_heads, spec.head_dim) for _ in "kv")
    q = random(len(step.token_ids), spec.heads, spec.head_dim)
    sinks = random(spec.heads, dtype=torch.float32) if spec.sinks else None
    bytes_moved = 2 * sum(lengths) * spec.kv_heads * spec.head_dim * env.dtype.itemsize
    return lambda: attention(
        q, k, v, step.query_start_loc, step.seq_lens, step.page_tables[0], step.max_kv_len,
        scale=spec.attention_scale, window=0, sinks=sinks, softcap=spec.attention_softcap,
    ), bytes_moved  # fmt: skip


def _sdpa_call(env: Environment, spec: ModelSpec) -> Callable[[], Tensor]:
    """Returns a call of torch's own attention. Keys and values are contiguous, in the layout that suits torch."""
    random, tokens = RandomTensors(env), env.sizes.prompt
    q = random(1, spec.heads, tokens, spec.head_dim)
    k, v = (random(1, spec.kv_heads, tokens, spec.head_dim) for _ in "kv")
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@torch.inference_mode()
def linear_alone(env: Environment, model: str) -> Iterator[Row]:
    spec = spec_of(model)
    for name, (n, k) in products(spec).items():
        for rows in env.sizes.rows if name != "head" else env.sizes.rows[:-1]:
            if late := env.skip_reason(3):
                yield {"model": model, "weight": name, "rows": rows, "note": late}
                continue
            variants = FULL if name == "head" else (*FULL, *FEW_BITS)
            found = {variant: _product(env, spec, name, rows, variant) for variant in variants}
            memory_bound = rows <= MAX_MEMORY_BOUND_ROWS
            share, work = (env.share_of_copy, n * k * 2) if memory_bound else (env.share_of_gemm, 2 * n * k * rows)
            yield {
                "model": model, "weight": f"{name} {n} x {k}", "rows": rows,
                "µs invariant": 1e6 * found["invariant"], "%": share(work, found["invariant"]),
                "µs library": 1e6 * found["library"], "% library": share(work, found["library"]),
                **{f"µs {variant}": 1e6 * found[variant] for variant in variants[2:]},
                **{
                    f"% {variant}": share(work * FEW_BITS[variant] // 16 if memory_bound else work, found[variant])
                    for variant in variants[2:]
                },
                "of": "copy" if memory_bound else "GEMM", **compared(env, n, k, rows),
            }  # fmt: skip
    yield from known_weights(env)


def products(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Returns weight name → shape [N, K]."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return {
        "qkv": (spec.qkv_size, hidden), "o": (hidden, spec.heads * spec.head_dim), "gate_up": (2 * inner, hidden),
        "down": (hidden, inner), "head": (spec.vocab_size, hidden),
    }  # fmt: skip


def _product(env: Environment, spec: ModelSpec, name: str, rows: int, variant: str) -> float:
    """Returns the seconds of one matrix product as the decoder calls it, measured over several weights in turn."""
    random, (n, k) = RandomTensors(env), products(spec)[name]
    min_total = MIN_TOTAL_BYTES if env.cuda else 1
    bits = FEW_BITS.get(variant, 16)
    weights = [_packed(env, random(n, k), variant) for _ in range(min(16, 1 + min_total // (n * k * bits // 8)))]
    x = random(rows, k)

    def run() -> None:
        for weight in weights:
            if name == "gate_up":
                gated_linear(x, weight, spec.activation)
            else:
                linear(x, weight, fp32_out=name == "head", split_k=name != "head")

    return env.clock.seconds_on_device(run) / len(weights)


def _packed(env: Environment, weight: Tensor, variant: str) -> PackedLinear:
    if variant in FULL:
        return pack(weight, invariant=variant == "invariant")
    if variant == "int4":
        return pack_stacked([quantize_groups(weight, INT4, 128)], dtype=env.dtype, invariant=True)
    scheme = Scheme.of(variant)
    quantized = quantize(weight, scheme.kind)
    return pack_quantized(*quantized, dtype=env.dtype, invariant=True, dynamic=scheme.dynamic)


@torch.inference_mode()
def layer_alone(env: Environment, spec: ModelSpec, rows: int, variant: str) -> float:
    """Returns the seconds of all matrix products of a layer. variant: a name in FULL or FEW_BITS, or a Scheme's."""
    return sum(_product(env, spec, name, rows, variant) for name in products(spec) if name != "head")


@torch.inference_mode()
def kernels_alone(env: Environment, model: str) -> Iterator[Row]:
    spec = spec_of(model)
    for rows in env.sizes.rows:
        for name, (call, bytes_moved) in _small_kernels(env, spec, rows).items():
            seconds = env.clock.seconds_on_device(call)
            share = env.share_of_copy(bytes_moved, seconds)
            yield {"kernel": name, "rows": rows, "µs": 1e6 * seconds, "MB": bytes_moved / 1e6, "% of floor": share}


def _small_kernels(env: Environment, spec: ModelSpec, rows: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Returns, for each kernel except matrix products and attention, a call and the bytes that it must move."""
    random, size = RandomTensors(env), env.dtype.itemsize
    x, residual, weight = random(rows, spec.hidden_size), random(rows, spec.hidden_size), random(spec.hidden_size)
    gate_up, qkv = random(rows, 2 * spec.intermediate_size), random(rows, spec.qkv_size)
    pool = -(-rows // PAGE_SIZE) + 1
    k, v = (random(pool, PAGE_SIZE, spec.kv_heads, spec.head_dim) for _ in "kv")
    cos, sin = (random(rows, spec.head_dim, dtype=torch.float32) for _ in "cs")
    positions, slots = random.ids(rows, rows), random.ids(rows, pool * PAGE_SIZE)
    norms = (random(spec.head_dim), random(spec.head_dim)) if spec.qk_norm else (None, None)
    found: dict[str, tuple[Callable[[], object], int]] = {
        "add + norm": (lambda: add_rms_norm(x, residual, weight, EPS, offset=spec.norm_offset), 4 * x.nbytes),
        "gate": (lambda: act_and_mul(gate_up, spec.activation), gate_up.nbytes * 3 // 2),
        "norm of heads, rotary, K/V write": (
            lambda: qkv_rope_write(
                qkv, k, v, cos, sin, positions, slots, q_norm=norms[0], k_norm=norms[1], eps=EPS,
                offset=spec.norm_offset, dtype=env.dtype,
            ),
            2 * rows * spec.qkv_size * size + cos.nbytes + sin.nbytes,
        ),
    }  # fmt: skip
    if rows <= MAX_MEMORY_BOUND_ROWS:
        logits = random(rows, spec.vocab_size, dtype=torch.float32)
        greedy, drawn = (sampling_params(rows, kind, env.device) for kind in ((0.0, 0, 1.0, 0.0), (0.8, 0, 0.95, 0.0)))
        found["sample, greedy"] = (lambda: sample_plain(logits, *greedy), logits.nbytes)
        found["sample, temperature and top-p"] = (lambda: sample_plain(logits, *drawn), logits.nbytes)
    return found
