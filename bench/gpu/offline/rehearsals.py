"""Runs a worker's start and the bench's sections on the fake GPU.

The compilations that they need are then in the machine's launches. The plain PyTorch forms of some operations read
values of tensors, which the fake GPU does not have. So these forms are replaced by empty results.
"""

import json
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.gpu.clock import clock_of
from bench.gpu.environment import Environment, Row, spec_of
from bench.gpu.offline.checkpoint import LAYERS, add_mtp_head, eagle_head
from bench.gpu.offline.machine import Machine
from bench.gpu.sections import EXPERT_MODELS, ON_REQUEST, SECTIONS, Options, Task, tasks
from bench.gpu.setup import profiler
from bench.gpu.shapes import CONFIGS, FULL, Sizes
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from worker.engine.build import Engine, load_engine
from worker.operations import TORCH
from worker.ops.launch_options import GPU_OPTIONS
from worker.spec import ModelSpec

# name of a serving configuration → its settings
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "fp8-dynamic": {"quantization": "fp8-dynamic"},
    "int8": {"quantization": "int8", "max_batch_size": 64, "max_step_tokens": 512, "prefill_chunk_size": 512},
    "int8-dynamic": {"quantization": "int8-dynamic", "speculation": "ngram"},
    "int4": {"quantization": "int4"},
    "library": {"batch_invariant": False, "use_chunked_prefill": False},
    "contiguous": {"kv_cache_backend": "contiguous", "dtype": "float16", "overlap": False},
    "options": {"gpu_options": ",".join(GPU_OPTIONS)},
    "plain": {"dtype": "float32", "cuda_graphs": False, "page_size": 1},
}
# name of a serving configuration → the method of --speculative-config
DRAFTERS = {"draft-model": "draft_model", "mtp": "mtp", "eagle3": "eagle3"}
WAYS |= {way: {"overlap": False, "speculation": "ngram", "max_draft_tokens": 3} for way in DRAFTERS}
EXPERTS = 9  # more experts than a token chooses in any of EXPERT_MODELS
APART = ("start", "ranks", "served", "killed", "peer")  # sections that start other processes
BRIEF = replace(FULL, steps=1, rounds=2)  # keeps every size that decides which kernels are compiled
SPANS = [profiler.Span("_linear_kernel", 0.0, 5.0), profiler.Span("_split_kernel", 6.0, 5.0)]


def empty_attention(q: Tensor, *rest: object, **how: object) -> Tensor:
    """Replaces the plain PyTorch forms of attention and experts: returns an uncomputed tensor shaped like q."""
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def started(folder: Path, way: str, max_seq_len: int = 0) -> Engine:
    """Starts a worker on the fake GPU: loads, warms up, captures graphs."""
    with patch(
        "worker.model_runner.check_kernels.TORCH", replace(TORCH, attention=empty_attention, experts=empty_attention)
    ):
        worker = WorkerConfig(device="cuda", **WAYS[way], **drafting(folder, DRAFTERS.get(way, "")))
        engine = load_engine(ModelConfig(model=str(folder), max_seq_len=max_seq_len), worker)
        engine.runner.check_device()
    return engine


def drafting(folder: Path, method: str) -> dict[str, Any]:
    """Returns the settings with which a model drafts by a method. The model's folder gets the head for it."""
    if not method:
        return {}
    stated = {"method": method, "num_speculative_tokens": 3}
    if method == "mtp":
        add_mtp_head(folder)
    else:
        stated["model"] = str(folder if method == "draft_model" else eagle_head(folder / "eagle", folder))
    return {"speculative_config": json.dumps(stated)}


def few_experts() -> AbstractContextManager[Any]:
    """Reduces EXPERT_MODELS to few experts per layer, because packing each expert takes long on the fake GPU.

    Do not use it where kernels are compiled, because some kernels are compiled for the number of experts.
    """
    names = ("num_experts", "num_local_experts")
    configs = {
        model: {name: EXPERTS if name in names else value for name, value in CONFIGS[model].items()}
        for model in EXPERT_MODELS
    }
    return patch.dict(CONFIGS, configs)


def section_tasks(models: tuple[str, ...], names: tuple[str, ...] = ()) -> list[Task]:
    """Returns the tasks of the named sections. Without names, returns those of all sections except APART and
    ON_REQUEST."""
    known = tuple(section.name for section in SECTIONS if section.name not in (*APART, *ON_REQUEST))
    return tasks(names or known, Options("cuda", models, False, 1, Path("trace")))


@contextmanager
def bench_environment(folder: Path, models: tuple[str, ...], sizes: Sizes = BRIEF) -> Iterator[Environment]:
    """Makes an environment for the tasks of `section_tasks`, on the fake GPU."""
    cuda = torch.device("cuda")
    with ExitStack() as stack:
        stack.enter_context(patch("bench.gpu.checks.cases_kv.attention_torch", empty_attention))
        stack.enter_context(patch("bench.gpu.checks.cases_experts.experts_torch", empty_attention))
        for form in ("delta_net", "mamba2", "short_conv"):
            stack.enter_context(patch(f"bench.gpu.checks.cases_recurrent.{form}_torch", empty_attention))
        stack.enter_context(patch("bench.gpu.measure.isolated_kernels.MIN_TOTAL_BYTES", 1))
        yield Environment(cuda, torch.bfloat16, sizes, clock_of(cuda), models, folder, 1, 1e12, folder / "trace")


def run_task(machine: Machine, task: Task, env: Environment) -> tuple[list[Row], list[str]]:
    """Runs a bench task with models of few layers. Returns its rows, and findings that would be errors on a GPU."""
    module, function = task.section.call.split(":")
    loaded = import_module(module)
    machine.findings[:] = []
    stand_ins: dict[str, Any] = {"spec_of": _few_layers, "record": lambda env, run, copy=None: run() or SPANS}
    rows: list[Row] = []
    with ExitStack() as stack:
        for name in stand_ins.keys() & vars(loaded).keys():
            stack.enter_context(patch.object(loaded, name, stand_ins[name]))
        try:
            rows += getattr(loaded, function)(env, task.argument)
        except Exception:
            machine.findings.append(traceback.format_exc())
    return rows, list(machine.findings)


def _few_layers(model: str, layers: int = 0) -> ModelSpec:
    """Returns a model's spec, reduced to two layers: one with a window and one without, if the model has both."""
    spec = spec_of(model, LAYERS.get(model, 2))
    return replace(spec, layers=spec.layers[-2:])
