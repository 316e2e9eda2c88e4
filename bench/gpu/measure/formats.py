"""Whole steps beyond section `decode`: long batches, weights of few bits, options; and prompts in the same formats."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from bench.gpu.environment import Environment, Row, spec_of
from bench.gpu.measure.decode import max_length, time_decodes
from bench.gpu.measure.prefill import to_first_token
from bench.gpu.setup.expert_weights import Stored
from bench.gpu.setup.harness import SERVED, Setup, build_harness
from bench.gpu.setup.roofline import kv_bytes, prefill_operations, weight_bytes
from bench.gpu.setup.weights import random_weights
from shared.config.worker import GPU_TOKENS
from worker.models.decoder import Weights
from worker.ops.launch_options import GPU_OPTIONS, NO_OPTIONS, GpuOptions, options_named
from worker.ops.quantized_weight import INT4, Scheme

GROUP = 128
LONG = 4096
LAUNCHES = options_named(["pdl", "last_combine", "fused_norms"])
SMALL_CONTEXT = 64  # without a GPU, contexts and batches are this small


@dataclass(frozen=True, slots=True)
class Format:
    """A format of weights and K/V. weight, kv: bytes of a number; 0: those of the model's dtype."""

    name: str
    stored: Stored = None
    kv_dtype: str = "auto"
    weight: float = 0
    kv: int = 0


BF16 = Format("bf16")
INT4_WEIGHTS = Format("int4 weights", (INT4, GROUP), weight=0.5 + 2 / GROUP)
FP8_WEIGHTS = Format("fp8 weights", Scheme("fp8"), weight=1)
FP8_DYNAMIC = Format("fp8 weights and activations", Scheme("fp8", dynamic=True), weight=1)
FP8_KV = Format("fp8 K/V", kv_dtype="fp8", kv=1)


@dataclass(frozen=True, slots=True)
class Case:
    """A step of `batch` decodes, each behind `context` tokens; or with batch 0, a prompt of `context` tokens."""

    format: Format
    batch: int
    context: int
    options: GpuOptions = NO_OPTIONS


CASES = (  # the most important ones first; those of a format follow one another, because its weights are made once
    Case(BF16, 64, LONG), Case(BF16, 1, 1024, LAUNCHES), Case(BF16, 64, LONG, LAUNCHES), Case(BF16, 0, 8192, SERVED),
    Case(BF16, 0, 8192), Case(BF16, 0, 8192, options_named([*GPU_OPTIONS])),
    Case(INT4_WEIGHTS, 1, 1024), Case(INT4_WEIGHTS, 64, LONG), Case(INT4_WEIGHTS, 0, 8192, SERVED),
    Case(INT4_WEIGHTS, 0, 8192), Case(FP8_DYNAMIC, 64, LONG), Case(FP8_DYNAMIC, 0, 8192), Case(FP8_WEIGHTS, 1, 1024),
    Case(FP8_WEIGHTS, 64, LONG), Case(FP8_KV, 64, LONG),
)  # fmt: skip


def measure(env: Environment, model: str) -> Iterator[Row]:
    spec = spec_of(model)
    for format, cases in groupby(CASES, lambda case: case.format):
        if env.skip_reason(12):
            yield from ({"model": model, **_what(case), "note": env.skip_reason(12)} for case in cases)
            continue
        scheme = format.stored if env.cuda or not isinstance(format.stored, tuple) else None  # codes are for GPUs
        weights = random_weights(spec, env.dtype, env.device, seed=env.seed, scheme=scheme)
        for case in cases:
            row = {"model": model, **_what(case)}
            if late := env.skip_reason(8):
                yield row | {"note": late}
            else:
                yield row | _measured(env, model, case, weights)


def _what(case: Case) -> Row:
    batch: Row = {"batch": case.batch} if case.batch else {"batch": "prompt"}
    return {"format": case.format.name, **batch, "context": case.context, "options": " ".join(case.options.names)}


def _measured(env: Environment, model: str, case: Case, weights: Weights) -> Row:
    spec, format, own = spec_of(model), case.format, env.dtype.itemsize
    batch, context = (case.batch, case.context) if env.cuda else (min(case.batch, 2), SMALL_CONTEXT)
    setup = Setup(kv=format.kv_dtype, options=case.options, step_tokens=0 if batch else min(context, GPU_TOKENS))
    sized = replace(env, sizes=replace(env.sizes, context=context, prompt=context))
    length = max_length(sized) if batch else context + 8
    harness = build_harness(sized, spec, setup, slots=batch or 2, max_length=length, weights=weights)
    if not batch:
        seconds, work = to_first_token(sized, harness, context), prefill_operations(spec, context)
        floor = work / env.limits.get("gemm", float("nan"))
        tokens = context
    else:
        harness.fill_cache_randomly()
        seconds, mean = time_decodes(sized, harness, batch)
        cached = kv_bytes(spec, [round(mean)] * batch, format.kv or own)
        floor = (weight_bytes(spec, batch, format.weight or own, own) + cached) / env.limits.get("copy", float("nan"))
        tokens = batch
    return {
        "ms": 1e3 * seconds,
        "tokens/s": tokens / seconds,
        "floor ms": 1e3 * floor,
        "% of floor": 100 * floor / seconds,
    }
