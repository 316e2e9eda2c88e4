"""The part `environment`: prints the GPU, versions, packages, the precompiled cache, and lastly what is wrong.

python -m bench.gpu.calls.machine cuda|cpu
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.gpu.calls.packages import DISTRIBUTIONS, SERVER, TESTS, missing, sentence
from bench.gpu.offline.packed_cache import misfit

GPU_FIELDS = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem,mig.mode.current"
OPTIONAL = ("pytest_asyncio",)
NEEDED = ("torch", "triton")
COMMAND_S = 20.0


def main(device: str) -> int:
    for line in (*_machine(), *_packages(), _cache()):
        print(line, flush=True)
    if problem := _problem(device):
        print(problem)
        return 1
    return 0


def _machine() -> Iterator[str]:
    yield f"Python {sys.version.split()[0]}, {platform.platform()}, {os.cpu_count()} processors"
    yield f"nvidia-smi: {_output('nvidia-smi', '-L')}"
    yield f"nvidia-smi: {_output('nvidia-smi', f'--query-gpu={GPU_FIELDS}', '--format=csv,noheader')}"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or ""
    yield f"C compiler: {_output(compiler, '--version') if compiler else 'none; Triton needs one to launch kernels'}"


def _output(*command: str) -> str:
    """Runs a command and returns its output as one line. For `--version`, returns only the first line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    lines = (done.stdout or done.stderr).strip().splitlines()
    return "; ".join(lines[:1] if "--version" in command else lines)


def _packages() -> Iterator[str]:
    """Yields the packages' versions and problems. Imports every package, because an installed package may be broken."""
    names = dict.fromkeys((*SERVER, *TESTS, *OPTIONAL))
    yield ", ".join(f"{DISTRIBUTIONS.get(name, name)} {_version(name)}" for name in names)
    if absent := missing(names):
        yield f"missing: {', '.join(absent)}; parts that need them are left out; {sentence(absent)}"


def _version(name: str) -> str:
    try:
        import_module(name)
        return version(DISTRIBUTIONS.get(name, name))
    except PackageNotFoundError:
        return "of unknown version"
    except Exception as error:
        return f"({type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else 'no reason given'})"


def _cache() -> str:
    folder = os.environ.get("TRITON_CACHE_DIR", "")
    if not folder:
        return "precompiled kernels: none, as TRITON_CACHE_DIR is not set; every kernel is compiled at its first use"
    wrong = misfit(Path(folder))
    return f"precompiled kernels: {wrong or f'those in {folder} fit'}"


def _problem(device: str) -> str:
    """Returns a sentence that says why nothing can be measured; empty if everything is there."""
    if absent := missing(NEEDED if device == "cuda" else NEEDED[:1]):
        return sentence(absent)
    import torch

    try:
        torch.ones(1, device=device).add_(1).item()
    except Exception as error:
        return f"--device {device} cannot compute: {type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
