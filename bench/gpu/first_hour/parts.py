"""The parts of the first hour, as data, in their order: cheap parts that can fail come first."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu.first_hour.packages import MODELS, SERVER, TESTS

GRACE_S = 20.0  # seconds between the bench's own time limit and the limit of its part
MODEL_KERNELS = ("rowwise/test_norm", "test_linear", "test_attention")
# With these variables, cuBLAS does not split K, so that its bits can be compared with ours.
ONE_CHAIN = {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
ALL_TESTS = ("tests/worker/kernels", "tests/worker/run")
MOST_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the first hour, which is run as one process.

    module: run with `python -m`. sections: sections of the bench; empty for other modules. words: further arguments;
    {device} stands for the device. packages: the part is left out if one is missing. need_s: the part is not started
    when fewer seconds are left. cap_s: time limit in seconds. others: whether the part measures all models but the
    first.
    essential: whether every command runs the part and, if the part fails, runs nothing else.
    """

    name: str
    title: str
    need_s: float
    cap_s: float
    module: str = "bench"
    sections: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    packages: tuple[str, ...] = MODELS
    environment: Mapping[str, str] = field(default_factory=dict)
    others: bool = False
    essential: bool = False

    def command(self, folder: Path, device: str, models: tuple[str, ...], seconds: float) -> list[str]:
        """Returns the words after `python -m`. seconds: the time in which the bench must end by itself."""
        if not self.sections:
            return [self.module, *(word.format(device=device) for word in self.words)]
        chosen = models[1:] if self.others else models[:1]
        names = {"--json": "rows.json", "--out": "report.md", "--log": "log.txt"}
        names |= {"--tiles": "measured_tiles.json"} if "sweep" in self.sections else {}
        files = [word for flag, name in names.items() for word in (flag, str(folder / name))]
        return [
            "bench", "gpu", "--device", device, "--models", ",".join(chosen), "--only", ",".join(self.sections),
            "--budget", f"{seconds:.0f}", *files, *self.words,
        ]  # fmt: skip


def _tests(name: str, title: str, cap_s: float, *paths: str) -> Part:
    """Returns a part that runs the tests in `paths` that need a GPU."""
    words = ("-x", "-q", "-m", "gpu", "-W", "ignore", "-p", "no:cacheprovider", *paths)
    return Part(name, title, 20, cap_s, module="pytest", words=words, packages=TESTS)


def _kernel_tests(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/worker/kernels/{name}.py" for name in names)


PARTS = (
    Part(
        "environment", "The GPU, versions, packages, the precompiled cache", 0, 120,
        module="bench.gpu.first_hour.machine", words=("{device}",), packages=(), essential=True,
    ),
    Part("floors", "Limits of the device", 10, 80, sections=("floors",), packages=("torch",)),
    _tests("kernel-tests", "Tests of norm, linear and attention", 240, *_kernel_tests(*MODEL_KERNELS)),
    Part("correct", "Correctness", 60, 480, sections=("correct",)),
    _tests("all-kernel-tests", "Tests of all kernels and of the runner", 300, *ALL_TESTS),
    Part("decode", "Decode steps", 60, 300, sections=("decode",)),
    Part("attention", "Attention alone", 20, 150, sections=("attention",)),
    Part("linear", "Products alone, beside the library's", 30, 200, sections=("linear",), environment=ONE_CHAIN),
    Part("prefill", "Long prompts", 30, 150, sections=("prefill",)),
    Part("idle", "Between steps", 30, 120, sections=("idle",)),
    Part("kernels", "Small kernels alone", 20, 120, sections=("kernels", "experts")),
    Part("graphs", "Capture of CUDA graphs", 30, 120, sections=("graphs",)),
    Part("ablations", "What each part of the fast path gains", 60, 300, sections=("ablations",)),
    Part("sweep", "Tiles of products", 90, 400, sections=("sweep",), environment=ONE_CHAIN),
    Part("start", "From the command to the first token", 90, 300, sections=("start",), packages=SERVER),
    Part("served", "Workloads through HTTP", 90, 260, sections=("served",), packages=SERVER),
    Part("others", "The other models", 60, 480, sections=("correct", "decode", "attention", "prefill"), others=True),
    Part("peer", "transformers' continuous batching", 60, 260, sections=("peer",), packages=SERVER),
    Part("ranks", "One model on several GPUs", 60, 115, sections=("ranks",)),
)  # fmt: skip


def parts_for(models: tuple[str, ...]) -> list[Part]:
    return [part for part in PARTS if not part.others or len(models) > 1]
