"""Measures the experts of a layer alone: router, grouping, both products and the sum.

The layers always come from EXPERT_MODELS, also if the benchmark measures other models. All rows of a measurement are
different, so they choose different experts.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from bench.gpu.checks.random_inputs import RandomTensors
from bench.gpu.environment import Environment, Row, spec_of
from bench.gpu.measure.isolated_kernels import MAX_MEMORY_BOUND_ROWS
from bench.gpu.setup.expert_weights import Stored, random_experts
from bench.gpu.setup.roofline import expert_parameters
from worker.ops.moe import experts
from worker.ops.moe.packed import Experts
from worker.ops.quantized_weight import E2M1, INT4, Scheme
from worker.spec import ModelSpec

FORMATS: dict[str, tuple[Stored, float]] = {  # name → storage format of the experts, and bytes per weight
    "16 bits": (None, 2),
    "fp8": (Scheme("fp8"), 1),
    "fp8-dynamic": (Scheme("fp8", dynamic=True), 1),
    "int4, groups of 128": ((INT4, 128), 0.5 + 2 / 128),
    "mxfp4": ((E2M1, 32), 0.5 + 2 / 32),
}


@torch.inference_mode()
def measure(env: Environment, model: str) -> Iterator[Row]:
    spec = spec_of(model, 1)
    if not env.cuda:  # the CPU only tests the benchmark, for which a small layer suffices
        spec = _smaller(spec)
    for name, (stored, size) in FORMATS.items():
        if late := env.skip_reason(6):
            yield {"model": model, "format": name, "note": late}
            continue
        layer = random_experts(spec, env.dtype, env.generator(), stored)
        for rows in env.sizes.rows:
            what: Row = {"model": model, "format": name}
            yield what | _row(env, spec, layer, rows, size)


def _row(env: Environment, spec: ModelSpec, layer: Experts, rows: int, size: float) -> Row:
    assert spec.experts is not None
    h, of = RandomTensors(env)(rows, spec.hidden_size), spec.experts
    seconds = env.clock.seconds_on_device(
        lambda: experts(h, layer, of.chosen, spec.activation, normalized=of.normalized)  # called as in the decoder
    )
    read = size * expert_parameters(spec, rows)
    row: Row = {"rows": rows, "µs": 1e6 * seconds, "MB": read / 1e6}
    if rows <= MAX_MEMORY_BOUND_ROWS:
        return row | {"%": env.share_of_copy(read, seconds), "of": "copy"}
    work = 2.0 * rows * expert_parameters(spec, 1)
    return row | {"%": env.share_of_gemm(work, seconds), "of": "GEMM"}


def _smaller(spec: ModelSpec) -> ModelSpec:
    assert spec.experts is not None
    of = replace(spec.experts, count=8, chosen=2, intermediate_size=64)
    return replace(spec, hidden_size=128, experts=of)
