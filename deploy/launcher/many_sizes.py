"""Estimates how much memory a model will take, from its checkpoint's headers. The weights are not read.

Where the headers leave the size open, the larger size counts, because too small an estimate would promise memory that
is not there.
"""

import asyncio
import contextlib
import json
import math
import os
import re
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.launcher.child_command import DEMO, child_environment
from deploy.launcher.packaged_model import SMOLLM2
from shared.gguf.naming import HUB_NAME

if TYPE_CHECKING:
    from shared.gguf.container import StoredTensor

GIB = 1 << 30
# A worker's memory besides weights and K/V: libraries, tables and buffers of a step, with a vocabulary of 152,000
# tokens. With one of 49,000, a worker takes 300 MiB.
PROCESS_BYTES = 432 << 20
MOST_HEADER_BYTES = 100 << 20  # limit of the safetensors format
STORED_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
FLAG_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALE_BYTES = 4
# value of --quantization → (bits of a weight, number of weights that share a scale; 0: a whole row shares one)
LAYOUTS = {"fp8": (8, 0), "int8": (8, 128), "int4": (4, 128), "int4-g32": (4, 32)}
# dtype of a quantized checkpoint → most weights in one byte
MOST_CODES = {"I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 2, "I32": 2}
# type of a GGUF tensor → bits of a weight in memory, number of weights that share a scale, how many numbers these
# weights share (a scale, or also a minimum), and the bytes of such a number on a GPU: 2 if 16 bits hold it exactly.
GGUF_LAYOUTS = {
    "Q8_0": (8, 32, 1, 2), "Q4_0": (4, 32, 1, 2), "Q4_1": (4, 32, 2, 4), "Q5_0": (8, 32, 1, 2), "Q5_1": (8, 32, 2, 2),
    "Q2_K": (4, 16, 2, 4), "Q3_K": (4, 16, 1, 4), "Q4_K": (4, 32, 2, 4), "Q5_K": (8, 32, 2, 4), "Q6_K": (8, 16, 1, 4),
    "IQ4_NL": (4, 32, 1, 2), "IQ4_XS": (4, 32, 1, 4), "MXFP4": (4, 32, 1, 2), "NVFP4": (4, 16, 1, 4),
    "IQ3_S": (4, 32, 1, 4), "IQ3_XXS": (4, 32, 1, 4), "IQ2_S": (4, 16, 1, 4), "IQ2_XS": (4, 16, 1, 4),
    "IQ2_XXS": (4, 32, 1, 4), "IQ1_M": (4, 16, 1, 4), "IQ1_S": (4, 32, 1, 4), "TQ2_0": (4, 64, 1, 2),
    "TQ1_0": (4, 64, 1, 2),
}  # fmt: skip
# type of a GGUF tensor → numbers of a block, and the bytes of it that an embedding keeps if a tied head has its codes
GGUF_SCALES = {
    "Q8_0": (32, 2), "Q4_0": (32, 2), "Q4_1": (32, 4), "Q5_0": (32, 2), "Q5_1": (32, 4), "Q3_K": (256, 14),
    "Q4_K": (256, 16), "Q5_K": (256, 16), "Q6_K": (256, 18), "IQ4_NL": (32, 2), "IQ4_XS": (256, 8), "MXFP4": (32, 1),
    "NVFP4": (64, 4), "TQ2_0": (256, 2), "TQ1_0": (256, 2),
}  # fmt: skip
ONE_BYTE, SCALES = ("U8", "F8_E4M3"), ("_scale", "_scales")  # scales of NVFP4, MXFP4 and MXFP8
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
GGUF_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")  # tables of which rows are read
# parts of the names of layers' tensors that are not quantized
NOT_QUANTIZED = ("norm", "conv", "router", "gate.weight", "embed", "vision", "visual")


@dataclass(frozen=True, slots=True)
class Kept:
    """How a worker keeps weights: the values of --dtype and --quantization, and whether it computes on the CPU."""

    dtype: str = "auto"
    quantization: str = "auto"
    on_cpu: bool = True

    @property
    def widens_codes(self) -> bool:
        return self.quantization == "none"

    def nbytes(self, name: str, stored: str, shape: Sequence[int], nbytes: int) -> int:
        """Returns the bytes in memory of a tensor of a safetensors file.

        stored: its format in the file
        nbytes: its size in the file
        """
        if stored in ONE_BYTE and name.endswith(SCALES) and not self.widens_codes:
            return nbytes * SCALE_BYTES
        if stored not in STORED_BYTES:
            codes = nbytes * MOST_CODES.get(stored, 0) * FLAG_BYTES.get(self.dtype, 2)
            return max(nbytes, codes) if self.widens_codes else nbytes
        layout = LAYOUTS.get(self.quantization.removesuffix("-dynamic"))
        if layout is not None and len(shape) > 1 and _is_linear(name):
            return math.prod(shape[:-1]) * _row_bytes(shape[-1], *layout)
        return nbytes // STORED_BYTES[stored] * self.width(stored)

    def width(self, stored: str) -> int:
        """Returns the bytes in memory of an unquantized value. CPUs compute with float32 where a checkpoint has
        float16."""
        if self.dtype == "auto":
            return 4 if stored == "F16" and self.on_cpu else STORED_BYTES[stored]
        return FLAG_BYTES[self.dtype]

    def embedding(self, plain: int, codes: int | None, *, tied: bool, stored: int = 0) -> int:
        """Returns the bytes in memory of the token embedding, and of the LM head if both are the same tensor.

        An embedding in blocks of a GGUF file stays in them on a CPU, or shares the codes of a tied head. Elsewhere it
        is kept unquantized, even if the file has codes of a few bits. A tied head takes memory of its own: the codes of
        the file or, on a CPU, a copy of the embedding, packed for the matrix product.

        plain: bytes of the unquantized embedding
        codes: bytes of its codes of a few bits, if the file has codes that are not widened
        stored: bytes of its blocks that it keeps on a CPU, if it has codes
        """
        copy, in_blocks = plain if self.on_cpu else 0, codes is not None and self.on_cpu
        return (stored if in_blocks else plain) + ((copy if codes is None else codes) if tied else 0)


def weights_bytes(files: Sequence[Path], kept: Kept) -> int:
    """Returns the bytes in memory of the weights in these files.

    Raises OSError, and ValueError for a damaged file.
    """
    if files and files[0].suffix != ".safetensors":
        return _gguf(files, kept)
    tensors = [tensor for file in files for tensor in _tensors(file)]
    tied = not any(name.endswith(HEAD) for name, *_ in tensors)
    return sum(
        kept.embedding(nbytes, None, tied=tied) if tensor[0].endswith(EMBEDDING) else nbytes
        for tensor in tensors
        for nbytes in [kept.nbytes(*tensor)]
    )


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a checkpoint folder that hold weights."""
    return sorted(folder.glob("*.safetensors"))


def _gguf(files: Sequence[Path], kept: Kept) -> int:
    """Returns the bytes in memory of GGUF files. Codes of a few bits are kept unless flags ask for unquantized weights.

    Unquantized tensors take the dtype that the worker computes with; on the CPU, float16 becomes float32.
    """
    from shared.gguf.config import dtype_of
    from shared.gguf.container import Container

    container = Container.read(files)
    width = kept.width({"float32": "F32", "float16": "F16"}.get(dtype_of(container), "BF16"))
    tied = "output.weight" not in container.tensors
    total = 0
    for name, tensor in container.tensors.items():
        plain = math.prod(tensor.shape) * width
        codes = None if kept.widens_codes or tensor.type in STORED_BYTES else _codes(tensor, kept, width)
        if name in GGUF_EMBEDDINGS:
            own_head = name == GGUF_EMBEDDINGS[0] and tied
            scales = GGUF_SCALES.get(tensor.type) if own_head else None
            stored = tensor.nbytes if scales is None else math.prod(tensor.shape) // scales[0] * scales[1]
            total += kept.embedding(plain, codes, tied=own_head, stored=stored)
        else:
            total += plain if codes is None else codes
    return max(sum(file.stat().st_size for file in files), total)


def _codes(tensor: "StoredTensor", kept: Kept, width: int) -> int:
    """Returns the bytes in memory of a GGUF tensor in a block format. width: bytes of an unquantized value"""
    weights = math.prod(tensor.shape)
    bits, group, numbers, on_gpu = GGUF_LAYOUTS.get(tensor.type, (8, 16, 2, 4))
    return weights * bits // 8 + weights // group * numbers * (width if kept.on_cpu else on_gpu)


def _is_linear(name: str) -> bool:
    return "layers." in name and not any(word in name for word in NOT_QUANTIZED)


def _row_bytes(columns: int, bits: int, group: int) -> int:
    return -(-columns * bits // 8) + -(-columns // (group or columns or 1)) * SCALE_BYTES


def _tensors(file: Path) -> list[tuple[str, str, list[int], int]]:
    """Reads the name, format, shape and bytes of each tensor of a safetensors file."""
    with file.open("rb") as opened:
        head = opened.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= MOST_HEADER_BYTES:
            raise ValueError(f"{file.name} is no safetensors file")
        header = json.loads(opened.read(length))
    try:
        return [_tensor(name, value) for name, value in header.items() if name != "__metadata__"]
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file.name}, a safetensors file, has a damaged header") from error


def _tensor(name: str, value: Any) -> tuple[str, str, list[int], int]:
    begin, end = value["data_offsets"][:2]
    return name, value["dtype"], [int(size) for size in value["shape"]], int(end) - int(begin)


# Fetches models of the table from the hub when they are first requested. The size of a model is unknown until then.
# Each model is fetched by a process `sluice pull`, which ends with the launcher.

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MOST_REASON_CHARS = 1000


NO_SUCH_MODEL = 2  # the exit code of `sluice pull` for a name that means nothing
OnLine = Callable[[dict[str, Any]], None]


class FetchFailed(Exception):
    """A model could not be fetched; the message says why. code: the reason for machines"""

    def __init__(self, message: str, code: str = "pull_failed") -> None:
        super().__init__(message)
        self.code = code


class HubModels:
    """Finds the models of the table on this machine, and fetches missing ones."""

    def __init__(self, revision: str) -> None:
        """revision: the revision of every fetched model; empty: the head of its main branch"""
        self._revision = revision
        self._folders: dict[str, str] = {}

    def path(self, model: str) -> str:
        """Returns the path of a model: its folder if it was fetched from the hub, else `model` itself."""
        return self._folders.get(model, model)

    def is_away(self, model: str) -> bool:
        """Whether the model must be fetched before its size is known."""
        if model in (DEMO, SMOLLM2.name) or model in self._folders:
            return False
        named = HUB_ID.fullmatch(model) or HUB_NAME.fullmatch(model)
        return bool(named) and not Path(model).expanduser().exists()

    def found(self, model: str, folder: str) -> None:
        """Records where a fetched model lies."""
        if folder:
            self._folders[model] = folder

    async def fetch(self, model: str, on_line: OnLine = lambda line: None) -> None:
        """Downloads the files of a model that the hub's cache lacks. Raises FetchFailed.

        on_line: is called with each line of the progress
        """
        line = await run_pull([model, f"--revision={self._revision}", "--unjudged"], on_line)
        self.found(model, str(line.get("folder", "")))


async def run_pull(words: Sequence[str], on_line: OnLine) -> dict[str, Any]:
    """Runs `sluice pull --json` and returns its last line, which has model, flags and folder. Raises FetchFailed.

    If the caller is cancelled, the process ends; the next one continues the download.
    """
    command = [
        sys.executable, "-P", "-m", "deploy.cli.main", "pull", "--json", f"--parent={os.getpid()}", *words,
    ]  # fmt: skip
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=child_environment()
        )
    except OSError as error:
        raise FetchFailed(f"`sluice pull` did not start: {error.strerror}") from error
    assert process.stdout is not None and process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    line: dict[str, Any] = {}
    try:
        async for text in process.stdout:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                on_line(line)
        code, said = await process.wait(), await errors
    finally:
        errors.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if code or line.get("status") != "success":
        lines = said.decode(errors="replace").strip().splitlines() or ["`sluice pull` ended without a word"]
        reason = lines[-1].removeprefix("sluice pull: ")[:MOST_REASON_CHARS]
        raise FetchFailed(reason, "model_not_found" if code == NO_SUCH_MODEL else "pull_failed")
    return line
