"""Compiles the CPU library: plain C, gcc, a few seconds, once per change of sources or flags.

Knows file names and compiler flags; nothing of what the functions do. No compiler is not an error: plain torch serves.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from platform import machine

SOURCES = Path(__file__).with_name("csrc")
COMMON = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
AVX512BF16 = (*AVX512, "-mavx512bf16")
AMX = (*AVX512BF16, "-mprfchw")
UNITS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("cpu_features.c", ()),
    ("gemm/pack.c", ()),
    ("decoder.c", ()),
    ("rowwise.c", AVX2),
    ("rowwise.c", AVX512),
    ("rowwise.c", AVX512BF16),
    ("gemm/gemm_simd.c", AVX2),
    ("gemm/gemm_simd.c", AVX512),
    ("gemm/gemm_bf16.c", AVX512BF16),
    ("gemm/gemm_amx.c", AMX),
    ("attention/attention_simd.c", AVX2),
    ("attention/attention_simd.c", AVX512),
    ("attention/attention_bf16.c", AVX512BF16),
    ("attention/attention_amx.c", AMX),
)


def build(force: bool = False) -> Path | None:
    """The compiled library for today's sources, made now if it is not there; None where it cannot be made.

    Says why on stderr when it cannot. Safe to call from several processes at once.
    """
    if machine() not in ("x86_64", "AMD64"):
        return None
    try:
        return (None if force else _found()) or _make()
    except subprocess.CalledProcessError as failure:
        _say(f"compiling failed:\n{failure.stderr}")
    except (OSError, RuntimeError) as error:  # no folder to write to, no home, no room for a process
        _say(f"the C kernels cannot be compiled: {error}")
    return None


def _found() -> Path | None:
    """The library that came with the installation, or was made here before."""
    name = f"libsluice-{_key()}.so"
    return next((place() / name for place in (lambda: SOURCES, _cache) if os.path.exists(place() / name)), None)


def _make() -> Path | None:
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        _say("no C compiler (gcc) found")
        return None
    target = _folder() / f"libsluice-{_key()}.so"
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as room:
        os.replace(_compile(compiler, Path(room)), target)
    _remove_older(target)
    return target


def _compile(compiler: str, room: Path) -> Path:
    objects = [room / f"{i}.o" for i in range(len(UNITS))]

    def one(unit: tuple[str, tuple[str, ...]], to: Path) -> None:
        source, flags = unit
        _run(compiler, *COMMON, *flags, f"-I{SOURCES}", "-c", str(SOURCES / source), "-o", str(to))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, UNITS, objects))
    library = room / "library.so"
    _run(compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(library))
    return library


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _key() -> str:
    digest = hashlib.sha256(repr((COMMON, UNITS)).encode())
    for source in sorted(SOURCES.rglob("*.[ch]")):
        digest.update(str(source.relative_to(SOURCES)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _folder() -> Path:
    """Beside the sources; in the user's cache where the package is installed read-only."""
    if os.access(SOURCES, os.W_OK):
        return SOURCES
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"


def _remove_older(target: Path) -> None:
    """Removes libraries of other sources, but not from the cache, where they may be another installation's."""
    for other in SOURCES.glob("libsluice-*.so"):
        if target.parent == SOURCES and other != target:
            other.unlink(missing_ok=True)


def _say(reason: str) -> None:
    print(f"sluice: {reason}; the CPU runs on plain torch (slower)", file=sys.stderr)


if __name__ == "__main__":
    path = build(force="--force" in sys.argv[1:])
    if path is not None:
        print(path)
