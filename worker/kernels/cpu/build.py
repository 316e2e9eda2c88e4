"""Compiles the C library for CPUs with gcc. It compiles only when sources or flags have changed.

This module knows file names and compiler flags, not what the functions do. A missing compiler is not an error: the
worker then uses plain PyTorch.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from platform import machine

from shared.private_files import cache_folder, is_trusted, private_cache
from worker.kernels.cpu.instruction_set import ON_ARM

log = logging.getLogger("sluice.kernels")

SOURCES = Path(__file__).with_name("csrc")
COMMON = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVXVNNI = (*AVX2, "-mavxvnni")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
AVX512BF16 = (*AVX512, "-mavx512bf16")
AVX512VNNI = (*AVX512BF16, "-mavx512vnni")  # every processor with AVX-512 BF16 has VNNI
AMX = (*AVX512VNNI, "-mprfchw")
NEON = ("-march=armv8-a",)
DOTPROD = ("-march=armv8.2-a+dotprod",)
ROUND_TWICE = ("-ffp-contract=off",)  # no fused multiply-add: products are rounded before they are added

ANY = (
    "cpu_features.c", "gemm/pack.c", "gemm/pack_codes.c", "decoder.c", "experts.c", "ranks/ranks.c",
    "ranks/sockets.c", "adapters/adapters.c",
)  # fmt: skip
ROWS = (
    "adapters/add_product.c", "adapters/few_rows.c", "rowwise.c", "recurrent/mamba2.c", "recurrent/short_conv.c",
    "recurrent/delta_net.c",
)  # fmt: skip
PLAIN = ("gemm/gemm_simd.c", "attention/attention_simd.c", "floors/floors_simd.c")

# Each source with its compiler flags. From the flags, simd.h derives the suffix of the functions' names.
Units = tuple[tuple[str, tuple[str, ...]], ...]
X86_UNITS: Units = (
    *((source, ()) for source in ANY),
    ("gemm/unpack_blocks.c", ROUND_TWICE),
    *((source, flags) for source in ROWS for flags in (AVX2, AVX512, AVX512BF16)),
    *((source, flags) for source in PLAIN for flags in (AVX2, AVX512)),
    ("gemm/gemm_simd.c", AVXVNNI),
    ("gemm/gemm_bf16.c", AVX512VNNI),
    ("gemm/amx/gemm_amx.c", AMX),
    ("adapters/few_rows_tiles.c", AMX),
    ("attention/attention_bf16.c", AVX512BF16),
    ("attention/attention_amx.c", AMX),
    ("floors/floors_bf16.c", AVX512BF16),
    ("floors/floors_amx.c", AMX),
)
ARM_UNITS: Units = (
    *((source, ()) for source in ANY),
    ("gemm/unpack_blocks.c", ROUND_TWICE),
    *((source, NEON) for source in (*ROWS, *PLAIN)),
    ("gemm/gemm_simd.c", DOTPROD),
)
UNITS = ARM_UNITS if ON_ARM else X86_UNITS


def build(force: bool = False) -> Path | None:
    """Returns the library of the current sources, and compiles it if needed. Returns None if it cannot be compiled.

    Writes the reason for a failure to stderr. Several processes may call this function at the same time.
    """
    if machine() not in ("x86_64", "aarch64"):
        return None
    try:
        return (None if force else _existing()) or _compile_library(force)
    except subprocess.CalledProcessError as failure:
        needed = "gcc 12 or newer and libc6-dev" + (" and libsimde-dev (SIMDe 0.7.4 or newer)" if ON_ARM else "")
        _warn(f"the C kernels do not compile ({_first_error(failure.stderr)})", f"install {needed}")
    except (OSError, RuntimeError) as error:  # for example, the private folder is not writable, or gcc gets no memory
        _warn(
            f"the C kernels cannot be compiled ({error})", "set XDG_CACHE_HOME to a folder that only you can write to"
        )
    return None


def _existing() -> Path | None:
    """Returns the library if it was installed with the package or compiled here before.

    Raises OSError if the folder is writable for other users: these users could make this process run their code.
    """
    name = f"libsluice-{_key()}.so"
    if (SOURCES / name).exists():
        return SOURCES / name
    if not (cached := cache_folder() / name).exists():
        return None
    private_cache()
    return cached if is_trusted(cached) else None


def _compile_library(force: bool) -> Path | None:
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        _warn("no C compiler was found", "install gcc (Debian, Ubuntu: apt install gcc libc6-dev)")
        return None
    target = _folder() / f"libsluice-{_key()}.so"
    with (target.parent / ".build-lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # If several workers start together, only one compiles.
        if not force and (found := _existing()):
            return found
        log.info("building the C kernels with %s, once; this takes half a minute", compiler)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
            os.replace(_compile(compiler, Path(scratch)), target)
        _remove_older(target)
    return target


def _compile(compiler: str, folder: Path) -> Path:
    objects = [folder / f"{i}.o" for i in range(len(UNITS))]

    def compile_unit(unit: tuple[str, tuple[str, ...]], to: Path) -> None:
        source, flags = unit
        _run(compiler, *COMMON, *flags, f"-I{SOURCES}", "-c", str(SOURCES / source), "-o", str(to))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_unit, UNITS, objects))
    library = folder / "library.so"
    _run(compiler, "-shared", "-fopenmp", *map(str, objects), "-lm", "-o", str(library))
    return library


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _key() -> str:
    digest = hashlib.sha256(repr((COMMON, UNITS)).encode())
    for source in sorted(SOURCES.rglob("*.[ch]")):
        digest.update(str(source.relative_to(SOURCES)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _folder() -> Path:
    """Returns the folder of the sources, or the user's cache if the package is installed read-only."""
    if os.access(SOURCES, os.W_OK):
        return SOURCES
    return private_cache()


def _remove_older(target: Path) -> None:
    """Removes libraries of older sources. The user's cache is left alone, because other installations share it."""
    for other in SOURCES.glob("libsluice-*.so"):
        if target.parent == SOURCES and other != target:
            other.unlink(missing_ok=True)


def _first_error(output: str) -> str:
    """Returns the first line with an error in a compiler's output; if there is none, the first line."""
    lines = output.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "without a message")


def _warn(reason: str, remedy: str) -> None:
    print(f"sluice: {reason}, so plain PyTorch computes, which is several times slower: {remedy}", file=sys.stderr)


if __name__ == "__main__":
    path = build(force="--force" in sys.argv[1:])
    if path is not None:
        print(path)
