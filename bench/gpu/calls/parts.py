"""The parts of the three commands, as data."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from bench.gpu.calls.packages import MODELS, SERVER, TESTS

GRACE_S = 12.0  # seconds between the bench's own time limit and the limit of its part
MOST_ATTEMPTS = 2
# With these variables, cuBLAS does not split K, so that its bits can be compared with ours.
ONE_CHAIN = {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
PYTEST = ("-q", "-m", "gpu", "-W", "ignore", "-p", "no:cacheprovider", "--tb=short")
CHECKS, SPEED, SERVED = "checks", "speed", "served"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a command, which is run as one process.

    call: the command that runs it. cap_s: time limit in seconds. need_s: the part is not started when fewer seconds are
    left. sections: sections of the bench; checks: the kernels and checks of section `correct`, all if empty. tests:
    what pytest runs, on `processes` processes if pytest-xdist is there. words: further arguments, or the whole command
    after `python` if there are neither sections nor tests; {device} stands for the device. packages: the part is left
    out if one is missing. beside: whether it runs while other such parts run. others: whether it measures all models
    but the first.
    essential: whether every command runs the part and, if the part fails, runs nothing else.
    """

    name: str
    title: str
    call: str
    need_s: float
    cap_s: float
    sections: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    processes: int = 1
    words: tuple[str, ...] = ()
    packages: tuple[str, ...] = MODELS
    environment: Mapping[str, str] = field(default_factory=dict)
    others: bool = False
    beside: bool = False
    essential: bool = False

    def command(self, folder: Path, device: str, models: tuple[str, ...], seconds: float) -> list[str]:
        """Returns the command. seconds: the time in which the bench must end by itself."""
        words = tuple(word.format(device=device) for word in self.words)
        if self.tests:
            spread = ("-n", str(self.processes)) if self.processes > 1 and find_spec("xdist") else ()
            return [sys.executable, "-m", "pytest", *PYTEST, *spread, *words, *self.tests]
        if not self.sections:
            return [sys.executable, *words]
        names = {"--json": "rows.json", "--out": "report.md", "--log": "log.txt"}
        names |= {"--tiles": "measured_tiles.json"} if "sweep" in self.sections else {}
        files = [word for flag, name in names.items() for word in (flag, str(folder / name))]
        checks = ("--checks", ",".join(self.checks)) if self.checks else ()
        chosen = ",".join(models[1:] if self.others else models[:1])
        return [
            sys.executable, "-m", "bench", "gpu", "--device", device, "--models", chosen,
            "--only", ",".join(self.sections), *checks, "--budget", f"{seconds:.0f}", *files, *words,
        ]  # fmt: skip


def _checked(name: str, *checks: str) -> Part:
    title = f"Correctness: {', '.join(checks)}"
    return Part(f"correct-{name}", title, CHECKS, 30, 240, sections=("correct",), checks=checks, beside=True)


def _tests(name: str, title: str, processes: int, most_failures: int, *paths: str) -> Part:
    return Part(
        name, title, CHECKS, 30, 240, tests=paths, processes=processes, words=(f"--maxfail={most_failures}",),
        packages=TESTS, beside=True,
    )  # fmt: skip


def _measured(name: str, title: str, call: str, need_s: float, cap_s: float, *sections: str, **how: object) -> Part:
    return Part(name, title, call, need_s, cap_s, sections=sections, **how)  # type: ignore[arg-type]


PARTS = (
    Part(
        "environment", "The GPU, versions, packages, the precompiled cache", "", 0, 60,
        words=("-m", "bench.gpu.calls.machine", "{device}"), packages=(), essential=True,
    ),
    _tests(
        "kernel-tests", "Tests of all kernels and of the runner", 7, 50,
        "tests/worker/ops", "tests/worker/model_runner",
    ),
    _tests("matrix", "The same bits in every batch, chunk and page", 3, 20, "tests/worker/test_gpu_matrix.py"),
    _checked("small", "norm", "rotary", "store_kv", "qkv_rope_write", "act_and_mul", "recurrent", "sample", "experts"),
    _checked("attention", "attention", "fused"),
    _checked("products", "linear", "quantized"),
    _checked("few-bits", "low_bit"),
    _checked("rows", "rows", "long"),
    _checked("invariance", "invariance"),
    _checked("ids", "ids"),
    _measured("steps", "Whole steps, attention and prompts", CHECKS, 40, 150, "decode", "attention", "prefill"),
    _measured(
        "steps-of-others", "The same for the other models", CHECKS, 40, 100, "decode", "attention", "prefill",
        others=True,
    ),
    _measured("formats", "Whole steps in few bits, of long batches, with options", SPEED, 40, 165, "formats"),
    _measured("linear", "Products alone, beside cuBLAS", SPEED, 30, 80, "linear", environment=ONE_CHAIN),
    _measured("ablations", "What each part of the fast path gains", SPEED, 60, 140, "ablations"),
    _measured("idle", "Between steps; capture of CUDA graphs", SPEED, 30, 70, "idle", "graphs"),
    _measured("kernels", "Small kernels and experts alone", SPEED, 20, 70, "kernels", "experts"),
    _measured("served", "Workloads through HTTP", SERVED, 90, 150, "served", packages=SERVER),
    _measured("killed", "A worker is killed under load", SERVED, 60, 90, "killed", packages=SERVER),
    _measured("start", "From the command to the first token", SERVED, 60, 90, "start", packages=SERVER),
    _measured("peer", "transformers' continuous batching", SERVED, 60, 90, "peer", packages=SERVER),
    Part(
        "sanitizer", "Reads and writes out of bounds", SERVED, 30, 60, packages=TESTS,
        words=("-m", "bench.gpu.calls.sanitizer", "tests/worker/ops/rowwise/test_norm.py"),
    ),
    _measured("ranks", "One model on several GPUs", SERVED, 60, 115, "ranks"),
    _measured("sweep", "Tiles of products", SERVED, 60, 200, "sweep", environment=ONE_CHAIN),
)  # fmt: skip
CALLS = (CHECKS, SPEED, SERVED)


def parts_for(call: str, models: tuple[str, ...]) -> list[Part]:
    """Returns the parts of a command, in their order. Parts that run side by side come first."""
    return [part for part in PARTS if part.call in ("", call) and (len(models) > 1 or not part.others)]
