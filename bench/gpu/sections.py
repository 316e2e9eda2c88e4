"""The sections of `sluice bench gpu`, as data. Each section is divided into tasks that can fail separately.

Does not import torch, because the driver's process uses this module and must survive a broken device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KERNELS = (
    "norm",
    "rotary",
    "store_kv",
    "qkv_rope_write",
    "attention",
    "act_and_mul",
    "recurrent",
    "linear",
    "quantized",
    "low_bit",
    "fused",
    "experts",
    "sample",
)
CHECKS = ("rows", "invariance", "long", "ids")
NOTE = "note"
EXPERT_MODELS = ("qwen3-30b-a3b", "gpt-oss-20b")


@dataclass(frozen=True, slots=True)
class Options:
    device: str
    models: tuple[str, ...]
    small: bool
    seed: int
    trace: Path | None = None
    tiles: Path | None = None
    checks: tuple[str, ...] = ()


Arguments = Callable[[Options], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Section:
    """A section, which gives one table.

    columns: the keys of the rows, which are also the headings. call: module:function, called with (env, argument);
    there is one task for each argument. need_s: a task is not started when fewer seconds are left. cap_s: a task that
    runs longer is ended; time in which kernels are compiled does not count.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    call: str
    arguments: Arguments
    need_s: float
    cap_s: float


@dataclass(frozen=True, slots=True)
class Task:
    section: Section
    argument: str


def _models(options: Options) -> tuple[str, ...]:
    return options.models


def _first_model(options: Options) -> tuple[str, ...]:
    return options.models[:1]


def _once(options: Options) -> tuple[str, ...]:
    return ("",)


def _with_experts(options: Options) -> tuple[str, ...]:
    return EXPERT_MODELS


def _checks(options: Options) -> tuple[str, ...]:
    wanted = options.checks or (*KERNELS, *CHECKS)
    kernels = (kernel for kernel in KERNELS if kernel in wanted)
    return (*kernels, *(f"{check} {model}" for check in CHECKS if check in wanted for model in options.models))


def _traces(options: Options) -> tuple[str, ...]:
    return options.models[:1] if options.trace else ()


SECTIONS: tuple[Section, ...] = (
    Section(
        "correct", "Correctness: kernels against their PyTorch form in fp32 on random inputs; same bits; same ids",
        ("what", "cases", "worst", "bound", "result"),
        "bench.gpu.checks.correctness:check", _checks, 5, 240,
    ),
    Section(
        "floors", "Floors: the limits of the device",
        ("what", "value", "unit"),
        "bench.gpu.measure.device_limits:measure", _once, 3, 60,
    ),
    Section(
        "decode", "Decode: a step of the whole loop (schedule, pack, forward, sample, commit, publish), greedy",
        ("model", "format", "batch", "context", "ms a step", "tokens/s", "floor ms", "% of floor"),
        "bench.gpu.measure.decode:measure", _models, 15, 150,
    ),
    Section(
        "attention", "Attention alone: decode against the copy bandwidth, prefill against the GEMM rate",
        ("heads of", "what", "ms", "rate", "unit", "%"),
        "bench.gpu.measure.isolated_kernels:attention_alone", _models, 8, 60,
    ),
    Section(
        "prefill", "Prefill of one prompt through the loop, to its first token",
        ("model", "prompt", "tokens a step", "ms", "tokens/s", "TFLOP/s", "% of GEMM rate"),
        "bench.gpu.measure.prefill:measure", _models, 10, 90,
    ),
    Section(
        "idle", "Between steps: idle time of the device, and the host's cost of a step",
        ("what", "batch", "value", "unit"),
        "bench.gpu.measure.idle:measure", _first_model, 15, 90,
    ),
    Section(
        "graphs", "CUDA graphs: captured at start, after their kernels are compiled",
        ("model", "batches up to", "graphs", "s", "ms a graph", "GB"),
        "bench.gpu.measure.graph_capture:measure", _models, 20, 120,
    ),
    Section(
        "formats", "Whole steps in more formats, with long batches and with options; prompts in the server's chunks",
        ("model", "format", "batch", "context", "options", "ms", "tokens/s", "floor ms", "% of floor"),
        "bench.gpu.measure.formats:measure", _first_model, 15, 240,
    ),
    Section(
        "ablations", "Ablations: ms with each optimization and without it",
        ("model", "without", "what", "ms with", "ms without", "gain %"),
        "bench.gpu.measure.ablations:measure", _models, 20, 180,
    ),
    Section(
        "linear", "Matrix products alone: few rows against the copy bandwidth, many against the GEMM rate",
        ("model", "weight", "rows", "µs invariant", "%", "µs library", "% library",
         "µs int8", "% int8", "µs fp8", "% fp8", "µs int4", "% int4", "of", "same bits", "row 0 alone"),
        "bench.gpu.measure.isolated_kernels:linear_alone", _first_model, 10, 100,
    ),
    Section(
        "sweep", "Tiles of products: the one that is used beside the fastest of those with the same bits",
        ("model", "weight", "rows", "used", "µs", "best", "µs best", "gain %", "µs library", "tried", "result"),
        "bench.gpu.measure.tile_sweep:measure", _models, 20, 600,
    ),
    Section(
        "experts", "Experts of a layer alone: few rows against the bytes of the chosen, many against the GEMM rate",
        ("model", "format", "rows", "µs", "MB", "%", "of"),
        "bench.gpu.measure.experts:measure", _with_experts, 10, 90,
    ),
    Section(
        "kernels", "Small kernels alone, against the copy bandwidth",
        ("kernel", "rows", "µs", "MB", "% of floor"),
        "bench.gpu.measure.isolated_kernels:kernels_alone", _first_model, 10, 60,
    ),
    Section(
        "trace", "Kernels of one decode step at a time, from the trace",
        ("kernel", "calls a step", "µs a step", "% of device time", "MB", "% of floor"),
        "bench.gpu.measure.trace:measure", _traces, 10, 90,
    ),
    Section(
        "start", "Start of `sluice serve` to the first token, from local disk",
        ("model", "page cache", "ready s", "first token s", "GB"),
        "bench.gpu.measure.startup:measure", _first_model, 60, 240,
    ),
    Section(
        "ranks", "Several GPUs for one model: decode steps and a prompt without HTTP, with one GPU and with more",
        ("model", "GPUs", "what", "tokens/s", "of one GPU"),
        "bench.gpu.measure.ranks:measure", _first_model, 60, 300,
    ),
    Section(
        "served", "Workloads through HTTP, random weights, ignore_eos",
        ("engine", "workload", "requests", "failed", "tokens/s", "TTFT p50 ms", "TTFT p99", "ITL p50 ms", "ITL p99"),
        "bench.gpu.measure.served:measure", _first_model, 60, 200,
    ),
    Section(
        "killed", "The same requests twice through HTTP; the second time, their worker gets SIGKILL",
        ("model", "what", "requests", "failed", "same texts", "s"),
        "bench.gpu.measure.killed:measure", _first_model, 45, 150,
    ),
    Section(
        "peer", "The same through transformers' continuous batching, in its own process: no HTTP, no text",
        ("engine", "workload", "requests", "failed", "tokens/s", "TTFT p50 ms", "TTFT p99", "ITL p50 ms", "ITL p99"),
        "bench.gpu.measure.transformers_peer:measure", _first_model, 45, 200,
    ),
)  # fmt: skip
# Has a row for each section in which kernels were compiled. The section needs no task, because the driver knows the
# seconds.
COMPILING = Section(
    "compiling", "Compiling: kernels that were not in Triton's cache, and their launchers",
    ("section", "compiled", "s"), "", _once, 0, 0,
)  # fmt: skip
CORRECT = "correct"
ALWAYS = ("floors",)  # always measured, because other sections report shares of these limits
ON_REQUEST = ("sweep",)  # only measured if named, because it takes minutes per model


def tasks(names: tuple[str, ...], options: Options) -> list[Task]:
    """Returns the tasks of the named sections, in the order of SECTIONS."""
    always = ALWAYS if {*names} - {CORRECT} else ()  # checks report no shares, and several of them may run at once
    chosen = [section for section in SECTIONS if section.name in names or section.name in always]
    return [Task(section, argument) for section in chosen for argument in section.arguments(options)]
