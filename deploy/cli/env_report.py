"""`sluice env`: describes this machine and installation for bug reports.

Without --measure it imports none of the listed packages and builds nothing. Unknown facts are reported as unknown;
nothing here fails.
"""

import ctypes
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path

from shared.build import version
from shared.config.flags import Parser, all_flags
from shared.machine import usable_cores, visible_gpus
from worker.ops.native_build import (
    EVERY_SET,
    TIERS,
    VARIABLE,
    ProgressLine,
    best_of,
    build,
    existing,
    highest_allowed,
    sets_in_use,
    sets_of_processor,
)

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "pyzmq", "msgspec", "starlette", "uvicorn")
# the flags in /proc/cpuinfo that matter to kernels for CPUs
CPU_FLAGS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8",
    "amx_bf16",
)  # fmt: skip
GPU_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
GIB = 1 << 30


def parser() -> Parser:
    parser = Parser(prog="sluice env", description="Describe this machine and this installation.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--measure", action="store_true",
        help="measure for a second how fast the CPU reads memory and multiplies; builds the C kernels if need be",
    )  # fmt: skip
    parser.add_argument(
        "--build", action="store_true",
        help="build the C kernels now, for every processor of this architecture; otherwise the first worker builds "
        "those that its processor uses",
    )  # fmt: skip
    return parser


def env(words: list[str]) -> int:
    args = parser().read(words)
    if args.build:
        with closing(ProgressLine()) as shown:
            build(EVERY_SET, on_progress=shown)
    facts = {name: find() for name, find in FACTS.items()} | (_floors() if args.measure else {})
    width = max(map(len, facts))
    lines = (f"{name:<{width}}  {fact}" for name, fact in facts.items())
    print(json.dumps(facts, indent=2) if args.json else "\n".join(lines))
    return 0


def _python() -> str:
    return f"{platform.python_version()} ({platform.python_implementation()}), {platform.platform()}"


def _version(package: str) -> Callable[[], str]:
    def find() -> str:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
        return "not installed"

    return find


def _cpu() -> str:
    fields = _table("/proc/cpuinfo")
    name = fields.get("model name") or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    features = [flag for flag in CPU_FLAGS if flag in fields.get("flags", fields.get("Features", "")).split()]
    return f"{name}, {cores} cores for this process" + (f", {' '.join(features)}" if features else "")


def _native() -> str:
    """Describes the library that a worker would use, and its instruction set."""
    if os.environ.get("SLUICE_NATIVE") == "0":
        return "switched off (SLUICE_NATIVE=0)"
    found = sets_of_processor()
    try:
        file = existing(sets_in_use(os.environ, found))
        if file is None:
            compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
            return (
                f"not built; a worker builds it with {compiler}"
                if compiler
                else "not built, and there is no C compiler"
            )
        used = best_of(ctypes.CDLL(str(file)), highest_allowed(os.environ))
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"the library cannot be loaded: {error}"
    best = found[-1] if found else TIERS[used]
    cap = f", as {VARIABLE} says; this processor has {best}" if os.environ.get(VARIABLE) and TIERS[used] != best else ""
    return f"{TIERS[used]}{cap} ({file})"


def _kernels() -> str:
    """Says which kernels a worker uses by default."""
    if visible_gpus():
        triton = _version("triton")() != "not installed"
        return "Triton on the GPU, if its test steps are right" if triton else "plain PyTorch on the GPU: no triton"
    native = _native().partition(" ")[0].strip(",")
    return f"C with {native}" if native in TIERS[1:] else f"plain PyTorch: the C kernels are {_native()}"


def _floors() -> dict[str, str]:
    """Measures memory bandwidth and rate of multiply-adds, with all cores of this process."""
    from worker.ops import roofline

    cores = usable_cores()
    try:
        found = roofline.measure(cores)
    except ValueError as error:
        return {"measured": str(error)}
    if found is None:
        return {"measured": "nothing: the C library does not run here"}
    bf16 = "not by this instruction set" if found.bf16_gflop_s is None else f"{found.bf16_gflop_s:.0f} GFLOP/s"
    return {
        "reading memory": f"{found.read_gb_s:.1f} GB/s with {cores} threads",
        "fp32 multiply-add": f"{found.fp32_gflop_s:.0f} GFLOP/s",
        "bf16 products": bf16,
    }


def _gpu() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none found (no nvidia-smi)"
    with suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run([tool, *GPU_QUERY], capture_output=True, text=True, timeout=10, check=True)
        return "; ".join(result.stdout.strip().splitlines()) or "none"
    return "none that responds"


def _memory() -> str:
    fields = _table("/proc/meminfo")
    total, free = (int(fields.get(name, "0 kB").split()[0]) * 1024 / GIB for name in ("MemTotal", "MemAvailable"))
    if not total:
        return "unknown"
    maximum = _text("/sys/fs/cgroup/memory.max")
    limit = f", limited to {int(maximum) / GIB:.1f} GiB" if maximum.isdigit() else ""
    return f"{total:.1f} GiB, {free:.1f} GiB available{limit}"


def _model_cache() -> str:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return os.environ.get("HF_HUB_CACHE") or str(home / "hub")


def _triton_cache() -> str:
    return os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")


def _variables() -> str:
    secret = {flag.variable for flag in all_flags() if flag.field.metadata["secret"]}
    names = sorted(name for name in os.environ if name.startswith("SLUICE_") and "KEY" not in name)
    return " ".join(f"{name}={'…' if name in secret else os.environ[name]}" for name in names) or "none"


def _table(path: str) -> dict[str, str]:
    """Parses lines of "name: value"; if a name occurs several times, its first value counts."""
    pairs = [line.partition(":")[::2] for line in _text(path).splitlines()]
    return {name.strip(): value.strip() for name, value in reversed(pairs)}


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


FACTS: dict[str, Callable[[], str]] = {
    "sluice": version,
    "python": _python,
    **{package: _version(package) for package in PACKAGES},
    "cpu": _cpu,
    "cpu kernels": _native,
    "kernels": _kernels,
    "gpu": _gpu,
    "memory": _memory,
    "model cache": _model_cache,
    "triton cache": _triton_cache,
    "settings": _variables,
}
