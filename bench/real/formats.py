"""The formats to measure, as data, and their files, which are all made from one GGUF file.

The GGUF file is dequantized once to float32. All other files are made from these float32 weights, rounded to bfloat16.
So the float32 model is the reference, although the published file itself is quantized.
"""

import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.awq_checkpoint import awq, awq_config
from bench.client.server import BenchError
from bench.gptq_checkpoint import gptq, gptq_config, write
from bench.peers import llama_cpp
from bench.real.dequantized import write_dequantized

GROUP = 64  # not 128, because 576, the length of the model's rows, is no multiple of 128
BF16 = ("--dtype", "bfloat16")
FOLDER, GIVEN, GPTQ, AWQ = "safetensors", "given", "gptq", "awq"  # files besides llama_cpp.WEIGHTS


@dataclass(frozen=True, slots=True)
class Format:
    """A format to measure. file: the file that Sluice reads; flags: flags of `sluice worker`.

    theirs: the file that llama.cpp reads, or empty if llama.cpp lacks the format; their_flags: flags of
    llama-perplexity.
    """

    file: str
    flags: tuple[str, ...] = ()
    theirs: str = ""
    their_flags: tuple[str, ...] = ()


FLOAT = ("--activations", "float")
FORMATS = {  # the key "file" stands for the GGUF file as it was published
    "float32": Format(FOLDER, ("--dtype", "float32")),
    "bfloat16": Format(FOLDER, BF16, "bf16"),
    "file": Format(GIVEN, FLOAT, GIVEN),
    "file-float32": Format(GIVEN, ("--dtype", "float32")),
    "file-int8-activations": Format(GIVEN, ("--activations", "int8")),
    "file-float32-int8-activations": Format(GIVEN, ("--dtype", "float32", "--activations", "int8")),
    "q8_0": Format("q8_0", FLOAT, "q8_0"),
    "q4_0": Format("q4_0", FLOAT, "q4_0"),
    "q4_k_m": Format("q4_k_m", FLOAT, "q4_k_m"),
    **{f"{name}-int8-activations": Format(name, ("--activations", "int8")) for name in ("q8_0", "q4_0", "q4_k_m")},
    "int8": Format(FOLDER, (*BF16, "--quantization", "int8")),
    "int4": Format(FOLDER, (*BF16, "--quantization", "int4")),
    "int4-g32": Format(FOLDER, (*BF16, "--quantization", "int4-g32")),
    "int8-int8-activations": Format(FOLDER, (*BF16, "--quantization", "int8", "--activations", "int8")),
    "int4-g32-int8-activations": Format(FOLDER, (*BF16, "--quantization", "int4-g32", "--activations", "int8")),
    f"gptq-g{GROUP}": Format(GPTQ, BF16),
    f"awq-g{GROUP}": Format(AWQ, BF16),
    "kv-int8": Format(FOLDER, (*BF16, "--kv-cache-dtype", "int8"), "bf16", ("-ctk", "q8_0", "-ctv", "q8_0")),
    "kv-int4": Format(FOLDER, (*BF16, "--kv-cache-dtype", "int4"), "bf16", ("-ctk", "q8_0", "-ctv", "q4_0")),
    "kv-fp8": Format(FOLDER, (*BF16, "--kv-cache-dtype", "fp8")),
}


@dataclass(frozen=True, slots=True)
class Files:
    """Paths. given: the GGUF file. peers: the folder where llama.cpp is built. root: the folder of all files made
    here."""

    given: Path
    peers: Path
    root: Path

    @property
    def folder(self) -> Path:
        return self.root / self.given.stem

    def path(self, file: str) -> Path:
        if file == GIVEN:
            return self.given
        if file == FOLDER:
            return self.folder
        return (
            llama_cpp.gguf(self.folder, file) if file in llama_cpp.WEIGHTS else self.root / f"{self.given.stem}-{file}"
        )

    def made(self, file: str) -> Path:
        """Returns the path of a format's file or folder, which is made if it is missing. Raises BenchError.
        file: a value of Format.file or Format.theirs."""
        path = self.path(file)
        match file:
            case "safetensors" | "gptq" | "awq" if not (path / "model.safetensors").exists():
                self._write(file, path)
            case _ if file in llama_cpp.WEIGHTS and not path.exists():
                self.made(FOLDER)
                for command in llama_cpp.requantize(self.peers, self.given, self.folder):
                    output(command)
                for command in llama_cpp.prepare(self.peers, self.folder, file, "best"):  # they convert the bf16 file
                    output(command)
        return path

    def _write(self, file: str, path: Path) -> None:
        if file == FOLDER:
            write_dequantized(self.given, path)
        elif file == GPTQ:
            write(self.made(FOLDER), path, gptq_config(GROUP), partial(gptq, group=GROUP))
        else:
            write(self.made(FOLDER), path, awq_config(GROUP), partial(awq, group=GROUP))


def output(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Runs a command and returns what it prints. If it fails, prints its errors and raises BenchError."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    except OSError as error:
        raise BenchError(f"{command[0]} cannot be run: {error.strerror}; is an older llama.cpp built there?") from error
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        raise BenchError(f"{' '.join(command)[:200]} failed")
    return done.stdout + done.stderr
