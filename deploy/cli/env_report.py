"""`sluice env`: what this machine and installation are, for a report of a bug. Imports none of what it names.

Whatever cannot be found out is said to be so; nothing here fails or builds anything.
"""

import ctypes
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from shared.flags import Parser

PACKAGES = ("sluice", "torch", "triton", "transformers", "tokenizers", "pyzmq", "msgspec", "starlette", "uvicorn")
TIERS = ("none", "avx2", "avx512", "avx512bf16", "amx")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # of /proc/cpuinfo: what the CPU kernels can use
NATIVE = Path(__file__).resolve().parents[2] / "worker" / "kernels" / "cpu" / "csrc"
GPU_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
GIB = 1 << 30


def parser() -> Parser:
    made = Parser(prog="sluice env", description="Says what this machine and this installation are.")
    made.add_argument("--json", action="store_true", help="as one JSON object")
    return made


def env(words: list[str]) -> int:
    given = parser().read(words)
    facts = {name: find() for name, find in FACTS.items()}
    width = max(map(len, facts))
    lines = (f"{name:<{width}}  {fact}" for name, fact in facts.items())
    print(json.dumps(facts, indent=2) if given.json else "\n".join(lines))
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
    features = [flag for flag in FLAGS if flag in fields.get("flags", "").split()]
    return f"{name}, {cores} cores for this process" + (f", {' '.join(features)}" if features else "")


def _native() -> str:
    """Of the library that is there; what is out of date is built again when a worker starts."""
    if os.environ.get("SLUICE_NATIVE") == "0":
        return "switched off (SLUICE_NATIVE=0)"
    found = sorted(NATIVE.glob("libsluice-*.so")) or sorted(_cache().glob("libsluice-*.so"))
    if not found:
        compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
        return f"not built; a worker builds it with {compiler}" if compiler else "not built, and there is no C compiler"
    try:
        tier = int(ctypes.CDLL(str(found[-1])).tier())
    except (OSError, AttributeError) as error:
        return f"{found[-1]} cannot be loaded: {error}"
    most = min(tier, int(os.environ.get("SLUICE_NATIVE_TIER", tier)))
    return f"{TIERS[most]} ({found[-1]})"


def _gpu() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none found (no nvidia-smi)"
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([tool, *GPU_QUERY], capture_output=True, text=True, timeout=10, check=True)
        return "; ".join(done.stdout.strip().splitlines()) or "none"
    return "none that answers"


def _memory() -> str:
    fields = _table("/proc/meminfo")
    total, free = (int(fields.get(name, "0 kB").split()[0]) * 1024 / GIB for name in ("MemTotal", "MemAvailable"))
    if not total:
        return "unknown"
    most = _text("/sys/fs/cgroup/memory.max")
    limit = f", limited to {int(most) / GIB:.1f} GiB" if most.isdigit() else ""
    return f"{total:.1f} GiB, {free:.1f} GiB of it available{limit}"


def _models() -> str:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return os.environ.get("HF_HUB_CACHE") or str(home / "hub")


def _kernels() -> str:
    return os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")


def _variables() -> str:
    names = sorted(name for name in os.environ if name.startswith("SLUICE_") and "KEY" not in name)
    return " ".join(f"{name}={os.environ[name]}" for name in names) or "none"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"


def _table(path: str) -> dict[str, str]:
    """Lines of "name: value"; the first of equal names counts."""
    pairs = [line.partition(":")[::2] for line in _text(path).splitlines()]
    return {name.strip(): value.strip() for name, value in reversed(pairs)}


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


FACTS: dict[str, Callable[[], str]] = {
    "python": _python,
    **{package: _version(package) for package in PACKAGES},
    "cpu": _cpu,
    "cpu kernels": _native,
    "gpu": _gpu,
    "memory": _memory,
    "model cache": _models,
    "triton cache": _kernels,
    "settings": _variables,
}
