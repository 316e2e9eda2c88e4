"""Compiles the C library for CPUs with gcc, if sources or flags have changed, for the instruction sets that are wanted.

    python -m worker.ops.native_build            compiles what this processor uses
    python -m worker.ops.native_build --here     compiles what this processor can run: SLUICE_ISA may lower it
    python -m worker.ops.native_build --all      compiles everything, for other processors, too

A library has its instruction sets in its name, so a processor takes only a library that has what it uses. This module
knows file names and compiler flags, not what the functions do. It imports no packages, so that it can compile while
packages are installed. A missing compiler is not an error: the worker then uses plain PyTorch.
"""

import atexit
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from platform import machine
from typing import Any

from shared.private_files import cache_folder, is_trusted, private_cache

# Names the instruction sets for which the C library has kernels, says which of them this processor has and uses, and
# reads the variable that limits them.
#
# This part imports no other module of this project, so that every command can check the variable before it starts a
# process.

VARIABLE = "SLUICE_ISA"
OF_X86 = ("none", "avx2", "avxvnni", "avx512", "avx512bf16", "amx")  # `supports` in cpu_features.c takes an index
OF_ARM = ("none", "neon", "dotprod")
ON_ARM = platform.machine() in ("aarch64", "arm64")
TIERS = OF_ARM if ON_ARM else OF_X86
# Instruction sets that have only kernels for matrix products (AMX also for attention) → the set of all other kernels
EXTENDS = {"avxvnni": "avx2", "amx": "avx512bf16", "dotprod": "neon"}
# The best instruction set of a processor → all sets whose kernels this processor may run. The kernels of AVX-512 for
# bfloat16 serve where the operating system does not permit AMX.
USES = {
    "avx2": ("avx2",),
    "avxvnni": ("avx2", "avxvnni"),
    "avx512": ("avx512",),
    "avx512bf16": ("avx512", "avx512bf16"),
    "amx": ("avx512", "avx512bf16", "amx"),
    "neon": ("neon",),
    "dotprod": ("neon", "dotprod"),
}
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
FEATURES = {  # instruction set → the features that it needs, by their names in /proc/cpuinfo
    "avx2": frozenset({"avx2", "fma"}),
    "avxvnni": frozenset({"avx2", "fma", "avx_vnni"}),
    "avx512": _AVX512,
    "avx512bf16": _AVX512 | {"avx512_bf16"},
    "amx": _AVX512 | {"avx512_bf16", "amx_bf16", "amx_tile"},
    "neon": frozenset(),
    "dotprod": frozenset({"asimddp"}),
}
SAME_BITS = frozenset({"avxvnni", "dotprod"})  # sets that give the same bits as the set that they extend


def highest_allowed(environment: Mapping[str, str]) -> int:
    """Returns the index in TIERS of the best instruction set that SLUICE_ISA allows. If the variable is unset or empty,
    all are allowed.

    Raises ValueError, with a sentence, for an unknown name.
    """
    name = environment.get(VARIABLE, "")
    if not name:
        return len(TIERS) - 1
    if name not in TIERS[1:]:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(TIERS[1:])}, not {name!r}")
    return TIERS.index(name)


def sets_of_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...] | None:
    """Returns the instruction sets that this processor has, in the order of TIERS; None if the system does not tell."""
    try:
        lines = [line.partition(":")[::2] for line in cpuinfo.read_text().splitlines()]
    except OSError:
        return None
    told = next((set(value.split()) for name, value in lines if name.strip() in ("flags", "Features")), None)
    return None if told is None else tuple(one for one in TIERS[1:] if FEATURES[one] <= told)


def sets_in_use(environment: Mapping[str, str], found: tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the instruction sets whose kernels a processor may run, if SLUICE_ISA allows them, in the order of TIERS.

    found: the instruction sets that the processor has; None if they are unknown
    Raises ValueError, with a sentence, if SLUICE_ISA is invalid.
    """
    allowed = TIERS[1 : highest_allowed(environment) + 1]
    if found is None:
        return allowed
    return next((USES[one] for one in reversed(allowed) if one in found), ())


def best_of(library: Any, allowed: int = len(TIERS) - 1) -> int:
    """Returns the index in TIERS of the processor's best instruction set for which the library has kernels; 0 if there
    is none.

    library: the C library (ctypes)
    allowed: the highest index that may be returned
    """
    usable = (i for i in range(1, allowed + 1) if library.supports(i) and hasattr(library, f"gemm_bf16_{TIERS[i]}"))
    return max(usable, default=0)


log = logging.getLogger("sluice.kernels")
LIBRARIES = Path(__file__).with_name("csrc")  # the folder of libraries and objects that are compiled in place
SOURCES = Path(__file__).parents[1]
FOLDERS = (  # the folders of C sources, below SOURCES. File names are unique, so sources include bare names.
    "ops/csrc", "ops/linear/csrc", "ops/linear/csrc/amx", "ops/linear/csrc/integer", "ops/attention/csrc",
    "ops/norm/csrc", "ops/activation/csrc", "ops/rope/csrc", "ops/moe/csrc", "ops/recurrent/csrc", "ops/embedding/csrc",
    "ops/sampling/csrc", "lora/csrc", "models/csrc", "encoder/csrc",
)  # fmt: skip
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
    "cpu_features.c", "pack.c", "pack_codes.c", "decoder.c", "encoder.c", "experts.c", "ranks.c", "sockets.c",
    "adapters.c",
)  # fmt: skip
ROWS = (
    "add_product.c", "few_rows.c", "norm.c", "activation.c", "rope.c", "combine.c", "mamba2.c", "short_conv.c",
    "delta_net.c", "text_attention.c",
)  # fmt: skip
PLAIN = ("gemm_simd.c", "attention_simd.c", "floors_simd.c", "sample.c")
# Each source with its compiler flags. From the flags, simd.h derives the suffix of the functions' names.
Unit = tuple[str, tuple[str, ...]]
Units = tuple[Unit, ...]
X86_UNITS: Units = (
    *((source, ()) for source in ANY),
    ("unpack_blocks.c", ROUND_TWICE),
    ("embedding.c", ROUND_TWICE),
    *((source, flags) for source in ROWS for flags in (AVX2, AVX512, AVX512BF16)),
    *((source, flags) for source in PLAIN for flags in (AVX2, AVX512)),
    ("gemm_simd.c", AVXVNNI),
    ("gemm_bf16.c", AVX512VNNI),
    ("gemm_amx.c", AMX),
    ("few_rows_tiles.c", AMX),
    ("attention_bf16.c", AVX512BF16),
    ("attention_amx.c", AMX),
    ("floors_bf16.c", AVX512BF16),
    ("floors_amx.c", AMX),
)
ARM_UNITS: Units = (
    *((source, ()) for source in ANY),
    ("unpack_blocks.c", ROUND_TWICE),
    ("embedding.c", ROUND_TWICE),
    *((source, NEON) for source in (*ROWS, *PLAIN)),
    ("gemm_simd.c", DOTPROD),
)
UNITS = ARM_UNITS if ON_ARM else X86_UNITS
# The instruction set of each group of flags. Units with other flags are part of every library.
SETS = {
    AVX2: "avx2", AVXVNNI: "avxvnni", AVX512: "avx512", AVX512BF16: "avx512bf16", AVX512VNNI: "avx512bf16", AMX: "amx",
    NEON: "neon", DOTPROD: "dotprod",
}  # fmt: skip
EVERY_SET = tuple(one for one in TIERS if one in SETS.values())
# How many seconds of CPU time gcc 12 took at most for a unit of each source. The longest units are compiled first, so
# that no core is left with a long one at the end. Sources that took less than half a second are left out.
SECONDS = {
    "attention_simd.c": 5.8, "gemm_simd.c": 4.5, "gemm_bf16.c": 4.3, "gemm_amx.c": 4.3, "few_rows.c": 2.5,
    "attention_bf16.c": 1.9, "attention_amx.c": 1.2, "few_rows_tiles.c": 0.8, "rope.c": 0.8, "norm.c": 0.7,
    "activation.c": 0.7, "delta_net.c": 0.7, "mamba2.c": 0.6,
}  # fmt: skip
POLL_S = 0.02
PROGRESS_DIGITS = 4  # the size of each of the two numbers in the file that other processes read
REPORT_S = 5.0  # a process that waits for the library logs the progress this often
# Called with (done, total) units several times a second; (0, 0) before the total is known. An exception that it raises
# ends the compilation.
Progress = Callable[[int, int], None]


def _quietly(done: int, total: int) -> None:
    pass


class NotCompiled(Exception):
    """There is no library. The message is one sentence that says why, and what to do."""


class Stopped(Exception):
    """The process ends before the library is complete."""


@cache
def begin() -> "Building":
    """Begins to build the library that this processor uses, once per process, in a thread: packages are imported and
    files are read meanwhile. Raises ValueError if SLUICE_ISA is invalid.
    """
    return Building(sets_in_use(os.environ, sets_of_processor()))


def built() -> Path | None:
    """Returns the library that `begin` builds, and begins if need be. Returns None if it cannot be compiled; the reason
    is on stderr.
    """
    return begin().result()


class Building:
    """Builds a library in a daemon thread. If the process ends before, the compiler is ended, too."""

    def __init__(self, sets: Sequence[str]) -> None:
        self.progress = (0, 0)  # units: compiled, and in total
        self._reported = False  # whether the reason of a failure was written to stderr
        self._future: Future[Path | None] = Future()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(tuple(sets),), name="compile", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def result(self, on_progress: Callable[[], None] = lambda: None) -> Path | None:
        """Waits for the library and returns what `build` does; logs the progress meanwhile.

        Only here is the reason of a failure written to stderr, once: a process that has begun to compile for others,
        which will wait for the library, writes nothing.

        on_progress: called when a unit is compiled. So a watchdog notices a compiler that hangs.
        """
        reported, told, seen = time.monotonic(), (-1, -1), (-1, -1)
        while self._thread.is_alive():
            self._thread.join(5 * POLL_S)
            if self.progress != seen:
                seen = self.progress
                on_progress()
            if seen != told and time.monotonic() - reported > REPORT_S:
                reported, told = time.monotonic(), seen
                log.info("%s", progress_line(*seen))
        if isinstance(failure := self._future.exception(), NotCompiled):
            if not self._reported:
                print(failure, file=sys.stderr)
            self._reported = True
            return None
        return self._future.result()

    def _run(self, sets: tuple[str, ...]) -> None:
        try:
            self._future.set_result(_found_or_compiled(sets, on_progress=self._note))
        except BaseException as error:
            self._future.set_exception(error)

    def _note(self, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise Stopped
        self.progress = (done, total)

    def _stop(self) -> None:
        self._stopping.set()
        self._thread.join(1.0)


def progress_line(done: int, total: int) -> str:
    return f"Building the CPU kernels: {done} of {total}" if total else "Building the CPU kernels"


def build(sets: Sequence[str] = EVERY_SET, *, force: bool = False, on_progress: Progress = _quietly) -> Path | None:
    """Returns a library of the current sources with kernels for at least these instruction sets, and compiles it if
    needed. Returns None if it cannot be compiled.

    Writes the reason for a failure to stderr. Several processes may call this function at the same time.
    """
    try:
        return _found_or_compiled(sets, force, on_progress)
    except NotCompiled as reason:
        print(reason, file=sys.stderr)
        return None


def _found_or_compiled(sets: Sequence[str], force: bool = False, on_progress: Progress = _quietly) -> Path | None:
    """Does what `build` does, but raises NotCompiled with the reason. Returns None on other architectures."""
    if machine() not in ("x86_64", "aarch64"):
        return None
    try:
        return (None if force else existing(sets)) or _compile_library(sets, force, on_progress)
    except subprocess.CalledProcessError as failure:
        needed = "gcc 12 or newer and libc6-dev" + (" and libsimde-dev (SIMDe 0.7.4 or newer)" if ON_ARM else "")
        raise _failure(
            f"the C kernels do not compile ({_first_error(failure.stderr)})", f"install {needed}"
        ) from failure
    except (OSError, RuntimeError) as error:  # for example, the private folder is not writable, or gcc gets no memory
        remedy = "set XDG_CACHE_HOME to a folder that only you can write to"
        raise _failure(f"the C kernels cannot be compiled ({error})", remedy) from error


def existing(sets: Sequence[str]) -> Path | None:
    """Returns a library with kernels for these instruction sets that was installed with the package or compiled before.

    Raises OSError if the folder is writable for other users: these users could make this process run their code.
    """
    if found := _with_sets(LIBRARIES, sets):
        return found[0]
    if not (cached := _with_sets(cache_folder(), sets)):
        return None
    private_cache()
    return next(filter(is_trusted, cached), None)


def _with_sets(folder: Path, sets: Sequence[str]) -> list[Path]:
    found = sorted(folder.glob(f"libsluice-{_key()}-*.so"))
    return [path for path in found if set(sets) <= set(path.stem.split("-")[2].split("+"))]


def _file_name(sets: Sequence[str]) -> str:
    return f"libsluice-{_key()}-{'+'.join(one for one in TIERS if one in sets) or TIERS[0]}.so"


def _compile_library(sets: Sequence[str], force: bool, on_progress: Progress) -> Path:
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        raise _failure("no C compiler was found", "install gcc (Debian, Ubuntu: apt install gcc libc6-dev)")
    target = _folder() / _file_name(sets)
    # If several processes start together, only one compiles.
    with _locked(target.parent / ".build-lock", on_progress) as share_progress:
        if not force and (found := existing(sets)):
            return found
        for left in target.parent.glob(".build-*/"):  # a killed process left it
            shutil.rmtree(left, ignore_errors=True)
        log.info("building the CPU kernels with %s, once", compiler)
        kept = objects_folder()
        if force and kept is not None:
            shutil.rmtree(kept, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
            os.replace(_compile(compiler, Path(scratch), units_of(sets), share_progress, kept), target)
        _remove_older(target)
        if kept is not None and set(sets) >= set(EVERY_SET):  # no library is left that would need the objects
            shutil.rmtree(kept, ignore_errors=True)
    return target


def objects_folder() -> Path | None:
    """Returns the folder that keeps compiled units for other libraries of the current sources; None if the package is
    installed read-only, because several installations share the user's cache.

    Only a process that holds the lock of LIBRARIES may write there.
    """
    return LIBRARIES / f".objects-{_key()}" if _folder() == LIBRARIES else None


@contextmanager
def _locked(file: Path, on_progress: Progress) -> Iterator[Progress]:
    """Holds the lock of a folder. The file has the progress of the process that holds it, for those that wait.

    Yields a function that takes the progress of this process.
    """
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while not _try_lock(lock):
            told = os.pread(lock, 2 * PROGRESS_DIGITS, 0)
            done, total = told[:PROGRESS_DIGITS], told[PROGRESS_DIGITS:]
            on_progress(*((int(done), int(total)) if told.isdigit() and total else (0, 0)))
            time.sleep(POLL_S)

        def share(done: int, total: int) -> None:
            os.pwrite(lock, b"%0*d%0*d" % (PROGRESS_DIGITS, done, PROGRESS_DIGITS, total), 0)
            on_progress(done, total)

        yield share
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def units_of(sets: Sequence[str]) -> Units:
    """Returns the units of a library with these instruction sets."""
    return tuple((source, flags) for source, flags in UNITS if SETS.get(flags) in (None, *sets))


def _compile(
    compiler: str, folder: Path, units: Units, on_progress: Progress = _quietly, kept: Path | None = None
) -> Path:
    """Compiles units, as many at a time as there are cores, and links them. Returns the library, a file in `folder`.

    kept: the folder of objects of the same sources. Units that are there are not compiled; the others are added.
    """
    objects = {unit: folder / f"{i}.o" for i, unit in enumerate(units)}
    if kept is not None:
        kept.mkdir(exist_ok=True)
        objects = {unit: kept / _object_name(compiler, unit) for unit in units}
    # the longest unit is the last one
    waiting = sorted((unit for unit in units if not objects[unit].exists()), key=lambda unit: SECONDS.get(unit[0], 0.0))
    running: dict[Unit, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                source, flags = unit = waiting.pop()
                made = folder / objects[unit].name
                command = (*COMMON, *flags, *includes(SOURCES), "-c", str(source_file(source)), "-o", str(made))
                with made.with_suffix(".txt").open("wb") as said:
                    running[unit] = subprocess.Popen(
                        (compiler, *command), stderr=said, stdin=subprocess.DEVNULL, process_group=0
                    )
            for unit in [unit for unit, process in running.items() if process.poll() is not None]:
                ended, made = running.pop(unit), folder / objects[unit].name
                if ended.returncode:
                    said_text = made.with_suffix(".txt").read_text(errors="replace")
                    raise subprocess.CalledProcessError(ended.returncode, ended.args, stderr=said_text)
                os.replace(made, objects[unit])  # a kept object is complete, whenever this process ends
            on_progress(len(units) - len(waiting) - len(running), len(units))
            time.sleep(POLL_S)
    finally:
        for process in running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # gcc's own children, too: gcc does not end them
            process.wait()
    library = folder / "library.so"
    _run(compiler, "-shared", "-fopenmp", *map(str, objects.values()), "-lm", "-o", str(library))
    return library


def includes(sources: Path) -> tuple[str, ...]:
    """Returns the compiler's flags that find the headers of a tree laid out like SOURCES."""
    return tuple(f"-iquote{sources / folder}" for folder in FOLDERS)


def source_file(name: str) -> Path:
    """Returns the path of a C source: its name is in one of FOLDERS, or it is an absolute path."""
    return next(path for folder in FOLDERS if (path := SOURCES / folder / name).exists())


def _object_name(compiler: str, unit: Unit) -> str:
    return hashlib.sha256(repr((compiler, COMMON, unit)).encode()).hexdigest()[:16] + ".o"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _key() -> str:
    digest = hashlib.sha256(repr((COMMON, UNITS)).encode())
    for source in sorted(path for folder in FOLDERS for path in (SOURCES / folder).glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _folder() -> Path:
    """Returns LIBRARIES, or the user's cache if the package is installed read-only."""
    if os.access(LIBRARIES, os.W_OK):
        return LIBRARIES
    return private_cache()


def _remove_older(target: Path) -> None:
    """Removes libraries and objects of older sources. The user's cache is left alone, because other installations share
    it.
    """
    if target.parent != LIBRARIES:
        return
    for other in LIBRARIES.glob("libsluice-*.so"):
        if not other.name.startswith(f"libsluice-{_key()}-"):
            other.unlink(missing_ok=True)
    for folder in LIBRARIES.glob(".objects-*/"):
        if folder.name != f".objects-{_key()}":
            shutil.rmtree(folder, ignore_errors=True)


def _first_error(output: str) -> str:
    """Returns the first line with an error in a compiler's output; if there is none, the first line."""
    lines = output.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "without a message")


def _failure(reason: str, remedy: str) -> NotCompiled:
    return NotCompiled(f"sluice: {reason}, so plain PyTorch computes, which is several times slower: {remedy}")


class ProgressLine:
    """Shows the progress on stderr: on a terminal a line that changes, elsewhere a line every REPORT_S seconds."""

    def __init__(self) -> None:
        self._line, self._next = "", 0.0

    def __call__(self, done: int, total: int) -> None:
        line, now = progress_line(done, total), time.monotonic()
        if line == self._line or (not sys.stderr.isatty() and now < self._next):
            return
        print(f"\r{line}" if sys.stderr.isatty() else line, end=self._end, file=sys.stderr, flush=True)
        self._line, self._next = line, now + REPORT_S

    def close(self) -> None:
        """Ends the changing line."""
        if self._line and not self._end:
            print(file=sys.stderr)

    @property
    def _end(self) -> str:
        return "" if sys.stderr.isatty() else "\n"


def main(words: Sequence[str]) -> int:
    found = sets_of_processor()
    sets = EVERY_SET if found is None or "--all" in words else found
    if not {"--all", "--here"} & set(words):
        sets = sets_in_use(os.environ, found)
    with closing(ProgressLine()) as shown:
        path = build(sets, force="--force" in words, on_progress=shown)
    if path is not None:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
