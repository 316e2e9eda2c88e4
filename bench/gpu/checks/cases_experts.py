"""Test cases for a layer's experts: every format, few rows and many rows, small sizes and real sizes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.gpu.checks.random_inputs import Case, RandomTensors, Tensors
from bench.gpu.environment import Environment, spec_of
from bench.gpu.setup.expert_weights import Stored, random_experts
from worker.ops.moe import clear_choices, experts
from worker.ops.moe.packed import Experts
from worker.ops.moe.reference import experts_torch
from worker.ops.quantized_weight import E2M1, E4M3, INT4, INT8, Scheme
from worker.spec import ModelSpec

FORMATS: tuple[Stored, ...] = (
    None, (INT4, 128), (E2M1, 32), (INT8, 32), (E4M3, 1 << 20), Scheme("int8"), Scheme("fp8"),
)  # fmt: skip
ROWS = (1, 7, 33, 130, 700)


def experts_cases(env: Environment) -> Iterator[Case]:
    qwen, gpt_oss = spec_of("qwen3-30b-a3b", 1), spec_of("gpt-oss-20b", 1)
    assert qwen.experts is not None
    odd = replace(qwen, hidden_size=264, experts=replace(qwen.experts, count=10, chosen=3, intermediate_size=88))
    for spec, stored in env.sample(product((odd, qwen, gpt_oss), FORMATS)):
        if not env.cuda and spec is not odd:
            continue
        layer = random_experts(spec, env.dtype, env.generator(), stored)
        for rows in ROWS:
            yield _experts(env, spec, layer, rows)


def _experts(env: Environment, spec: ModelSpec, layer: Experts, rows: int) -> Case:
    """Returns a case without the rows whose best experts have nearly equal scores, because rounding may change which
    experts are chosen."""
    assert spec.experts is not None
    random, of = RandomTensors(env), spec.experts
    h, add, gate = random(rows, spec.hidden_size), random(rows, spec.hidden_size), random(rows, 1, dtype=torch.float32)
    clear = clear_choices(h, layer, of.chosen, sigmoid=of.sigmoid)

    def compared(out: Tensor) -> Tensors:
        return (torch.where(clear[:, None], out, 0.0),)

    how: dict[str, Any] = {"normalized": of.normalized, "add": add, "add_gate": gate}
    return Case(
        f"experts {tuple(h.shape)} x {of.count} of {layer.gate_up.format}, {spec.activation}",
        lambda: compared(experts(h, layer, of.chosen, spec.activation, **how)),
        lambda: compared(experts_torch(h, layer, of.chosen, spec.activation, **how)),
    )
