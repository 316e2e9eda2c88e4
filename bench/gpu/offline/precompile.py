"""`sluice bench gpu --precompile DIR`: fills a Triton cache for a GPU on a machine without one.

Compiles the kernels that a worker's start and the bench need for the given models. Launchers are left out: on the GPU's
machine, Triton builds one for each signature with the C compiler (0.3 to 0.5 s each).
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.client.server import BenchError
from bench.gpu.offline.compiling import Binary
from bench.gpu.offline.packed_cache import pack
from bench.gpu.offline.triton_offline import Usage
from bench.gpu.offline.wheels import advice

ROOT = Path(__file__).parents[3]
START_WAY = "bf16"


def precompile(folder: Path, capabilities: Sequence[int], models: Sequence[str], python: str) -> int:
    """Fills and packs the cache. Returns 1 if a kernel cannot be compiled for one of the GPUs, else 0."""
    refuse_with_cuda("--precompile")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [*(f"{model}:{START_WAY}" for model in models), *models]
    binaries = [one for capability in capabilities for one in compiled(capability, jobs, folder)]
    seconds, cached_s = (sum(getattr(one, name) for one in binaries) for name in ("seconds", "cached_s"))
    archive = pack(folder, capabilities, len(binaries), seconds)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(
        f"{len(binaries)} kernels for sm_{', sm_'.join(map(str, capabilities))}: compiled in {seconds:.0f} s of one "
        f"core, found in the cache in {cached_s:.1f} s; {size / 1e6:.1f} MB in {folder}, packed {archive} of "
        f"{archive.stat().st_size / 1e6:.1f} MB",
        f"On the GPU's machine: tar xzf {archive.name} -C / && export TRITON_CACHE_DIR={folder}",
        "The path must be the same there, and so must the build of Triton; `--call` checks both.",
        advice(python),
        sep="\n",
    )
    problems = [one.problem for one in binaries if one.used is None]
    print(*problems, sep="\n", file=sys.stderr)
    return bool(problems)


def refuse_with_cuda(flag: str) -> None:
    """Raises BenchError on a machine with a GPU, because the fake GPU cannot replace a working CUDA."""
    import torch

    if torch.cuda.is_available():
        raise BenchError(f"{flag} needs a machine without a GPU; on this one the first start compiles as well")


def compiled(capability: int, jobs: Iterable[str], cache: Path | None = None) -> list[Binary]:
    """Runs compile_job in a process. cache: the folder for Triton's cache; None: Triton's default folder.

    Triton stores no intermediate code in the cache. Variables that are part of Triton's cache keys are not changed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_STORE_BINARY_ONLY"] = "1"
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "binaries.json"
        command = [sys.executable, "-m", "bench.gpu.offline.compile_job", str(capability), str(out), *jobs]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            raise BenchError(f"the kernels for sm_{capability} could not be compiled; see above")
        return [_binary(one) for one in json.loads(out.read_text())]


def _binary(data: dict[str, Any]) -> Binary:
    used = Usage(**data["used"]) if data["used"] else None
    return Binary(**{**data, "used": used, "kinds": tuple(data["kinds"])})
