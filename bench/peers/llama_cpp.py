"""llama.cpp as data: its builds for every instruction set, its files in every weight format, and its commands.

One build has a library for each kind of CPU. A program loads the best library in its folder that this CPU supports.
So a folder with links to the programs and to one library fixes the instruction set.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.checkpoints import FILE, PACKAGED
from bench.client.server import BenchError

Command = list[str]

VERSION = "0.3.36"  # version of llama-cpp-python, whose source archive contains llama.cpp
SOURCE = f"llama_cpp_python-{VERSION}"
PROGRAMS = (
    "llama-server",
    "llama-bench",
    "llama-batched-bench",
    "llama-quantize",
    "llama-imatrix",
    "llama-perplexity",
    "llama-tokenize",
)
BUILD = "lcpp-build"  # folder under root
WEIGHTS = ("bf16", "q8_0", "q4_0", "q4_k_m")  # formats for models of any shape
ANY_WEIGHTS = (*WEIGHTS, "mxfp4", "q4_1")  # mxfp4: for experts only; q4_1: for the packaged real model only


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set. sluice: the value of SLUICE_ISA for it. llama_cpp: the name of llama.cpp's library for it."""

    sluice: str
    llama_cpp: str


# GCC 12 assumes that loading a tile configuration reads 8 of its 64 bytes, and never writes the other bytes. The first
# tile operation then crashes. This change to llama.cpp's source makes GCC write all 64 bytes.
TILE_FIX = (
    "s/alignas(64) tile_config_t tc = {}/alignas(64) volatile tile_config_t tc = {}/; "
    "s/_tile_loadconfig(&tc)/_tile_loadconfig((const void *)\\&tc)/"
)

ISAS = {
    "best": Isa("", ""),  # each program chooses the instruction set by itself
    "avx2": Isa("avx2", "haswell"),
    "avx2+vnni": Isa("avx2", "alderlake"),
    "avx512": Isa("avx512", "icelake"),
    "avx512bf16": Isa("avx512bf16", "zen4"),
    "amx": Isa("amx", "sapphirerapids"),
}


def threads() -> str:
    return str(len(os.sched_getaffinity(0)))


def setup(root: Path) -> list[Command]:
    """Returns the commands that build all programs and the libraries for all ISAS. cmake and ninja are installed in an
    environment under root/lcpp."""
    sdist = root / "sdist"
    source = sdist / SOURCE / "vendor/llama.cpp"
    off = ["BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_UI", "USE_PREBUILT_UI", "BUILD_APP", "OPENSSL"]
    libraries = [f"ggml-cpu-{isa.llama_cpp}" for isa in ISAS.values() if isa.llama_cpp]
    return [
        [str(root / "lcpp/bin/pip"), "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(sdist),
         f"llama-cpp-python=={VERSION}"],
        ["tar", "xzf", str(sdist / f"{SOURCE}.tar.gz"), "-C", str(sdist)],
        ["sed", "-i", TILE_FIX, str(source / "ggml/src/ggml-cpu/amx/mmq.cpp")],
        ["cmake", "-S", str(source), "-B", str(root / BUILD), "-G", "Ninja",
         "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON",
         "-DBUILD_SHARED_LIBS=ON", *(f"-DLLAMA_{name}=OFF" for name in off)],
        ["cmake", "--build", str(root / BUILD), f"-j{threads()}", "--target", *PROGRAMS, *libraries],
    ]  # fmt: skip


def programs(root: Path, isa: str = "best") -> Path:
    """Returns the folder of the programs for one of ISAS."""
    return root / (f"lcpp-{isa}" if ISAS[isa].llama_cpp else f"{BUILD}/bin")


def prepare(root: Path, folder: Path, weights: str, isa: str) -> list[Command]:
    """Returns the commands that make the missing files: the checkpoint in `weights`, and the programs for `isa`.

    folder: the checkpoint in bfloat16, as bench/checkpoints.py makes it.
    """
    return [*link(root, isa), *_convert(root, folder, weights)]


def gguf(folder: Path, weights: str) -> Path:
    """Returns the path of a checkpoint's GGUF file, next to the checkpoint's folder. weights: one of WEIGHTS."""
    return folder.with_name(f"{folder.name}-{weights}.gguf")


def requantize(root: Path, source: Path, folder: Path) -> list[Command]:
    """Returns the command that converts a GGUF file to a checkpoint's bf16 file. Empty if the bf16 file exists."""
    to = gguf(folder, "bf16")
    quantize = str(programs(root) / "llama-quantize")
    return [] if to.exists() else [[quantize, "--allow-requantize", str(source), str(to), "BF16", threads()]]


def link(root: Path, isa: str) -> list[Command]:
    """Returns the commands that make the folder of programs for `isa`. They make hard links, because a program resolves
    symbolic links before it looks for libraries in its folder."""
    to, built = programs(root, isa), root / BUILD / "bin"
    if to.exists():
        return []
    scratch = to.with_suffix(".new")
    return [
        ["rm", "-rf", str(scratch)],
        ["cp", "-a", "-l", str(built), str(scratch)],
        ["find", str(scratch), "-name", "libggml-cpu-*", "!", "-name", f"*-{ISAS[isa].llama_cpp}.so", "-delete"],
        ["mv", str(scratch), str(to)],
    ]


def _convert(root: Path, folder: Path, weights: str) -> list[Command]:
    """Returns the commands that make the GGUF file, with random weights for a shape of LARGE (bench/checkpoints.py).
    Raises BenchError for a real model (PACKAGED) in another weight format than its file has."""
    to, full = gguf(folder, weights), gguf(folder, "bf16")
    if weights == FILE:
        return []
    if weights != PACKAGED.get(folder.name, weights):
        raise BenchError(f"{folder.name} is measured in {PACKAGED[folder.name]} only: its one file has these weights")
    if not (folder / "model.safetensors").exists():
        command = [sys.executable, "-m", "bench.peers.random_gguf", "--weights", weights, str(folder), str(to)]
        return [] if to.exists() else [command]
    write = [] if full.exists() else [[sys.executable, "-m", "bench.peers.gguf_file", str(folder), str(full)]]
    if to.exists() or weights == "bf16":
        return write
    quantize = str(programs(root) / "llama-quantize")
    return [*write, [quantize, str(full), str(to), weights.upper(), threads()]]


def serve(root: Path, folder: Path, port: int, weights: str, isa: str) -> Command:
    return [
        str(programs(root, isa) / "llama-server"), "-m", str(gguf(folder, weights)), "-t", threads(), "-c", "40960",
        "-np", "32", "-b", "2048", "-ub", "512", "--cache-ram", "0", "--load-mode", "none",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def bench_prefill(root: Path, folder: Path, weights: str, isa: str, tokens: int) -> Command:
    """Returns a command that prints one line of JSON, with the tokens per second of one prompt as `avg_ts`."""
    return [
        str(programs(root, isa) / "llama-bench"), "-m", str(gguf(folder, weights)), "-t", threads(), "-p", str(tokens),
        "-n", "0", "-r", "1", "-ub", "512", "-o", "jsonl",
    ]  # fmt: skip


def bench_decode(
    root: Path, folder: Path, weights: str, isa: str, prompt: int, steps: int, counts: list[int]
) -> Command:
    """Returns a command that prints a line of JSON for each number of sequences (`pl`), with the tokens per second of
    their decode as `speed_tg`. The sequences begin with copies of the K/V of one prompt."""
    context = max(counts) * (prompt + steps + 16)
    return [
        str(programs(root, isa) / "llama-batched-bench"), "-m", str(gguf(folder, weights)), "-t", threads(),
        "-c", str(context), "-b", "2048", "-ub", "512", "-npp", str(prompt), "-ntg", str(steps),
        "-npl", ",".join(map(str, counts)), "-pps", "--output-format", "jsonl",
    ]  # fmt: skip


def compare(root: Path, file: Path, isa: str, base: Path, window: int) -> Command:
    """Returns a command that compares a file's predictions with those saved in `base` (bench/real/base_file.py)."""
    return [
        str(programs(root, isa) / "llama-perplexity"), "-m", str(file), "-t", threads(), "-c", str(window),
        "-b", str(window), "-ub", "512", "--kl-divergence", "--kl-divergence-base", str(base),
    ]  # fmt: skip


def tokenize(root: Path, file: Path, text: Path) -> Command:
    """Returns a command that prints the ids of a text, as a list."""
    flags = ["--ids", "--no-bos", "--no-parse-special", "--log-disable"]
    return [str(programs(root) / "llama-tokenize"), "-m", str(file), "-f", str(text), *flags]


def importance(root: Path, file: Path, text: Path, to: Path, window: int, windows: int) -> Command:
    """Returns a command that writes the importance matrix of a file's weights for the beginning of a text."""
    return [
        str(programs(root) / "llama-imatrix"), "-m", str(file), "-f", str(text), "-t", threads(), "-c", str(window),
        "-b", str(window), "--chunks", str(windows), "-o", str(to),
    ]  # fmt: skip


def quantize(root: Path, source: Path, to: Path, matrix: Path, type: str, *flags: str) -> Command:
    """Returns a command that makes a file in another format. matrix: the file of an importance matrix."""
    quantize = str(programs(root) / "llama-quantize")
    return [quantize, "--allow-requantize", "--imatrix", str(matrix), *flags, str(source), str(to), type, threads()]


def save(root: Path, file: Path, text: Path, base: Path, window: int, windows: int) -> Command:
    """Returns a command that predicts the first windows of a text and writes its log-probabilities to `base`."""
    return [
        str(programs(root) / "llama-perplexity"), "-m", str(file), "-f", str(text), "-t", threads(), "-c", str(window),
        "-b", str(window), "--chunks", str(windows), "--save-all-logits", str(base),
    ]  # fmt: skip
