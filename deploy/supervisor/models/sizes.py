"""How much memory a model will take, from the files of its checkpoint: nothing of the weights is read."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

GIB = 1 << 30
PROCESS_BYTES = 300 << 20  # of a worker besides weights and K/V: libraries, buffers of a step
MOST_HEADER_BYTES = 100 << 20  # of a safetensors file; the format's own limit
HALF = {"BF16", "F16"}


def weights_bytes(files: Sequence[Path], *, widened: bool) -> int:
    """Returns how many bytes the weights in these files take in memory.

    widened: --dtype float32, which makes four bytes of each number of two. A model that is quantized while it loads
        takes less than this says.
    Raises OSError, and ValueError for a file that is damaged.
    """
    return sum(_safetensors(file, widened) if file.suffix == ".safetensors" else file.stat().st_size for file in files)


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a checkpoint folder that have its weights."""
    return sorted(folder.glob("*.safetensors"))


def _safetensors(file: Path, widened: bool) -> int:
    with file.open("rb") as opened:
        head = opened.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= MOST_HEADER_BYTES:
            raise ValueError(f"{file.name} is no safetensors file")
        header = json.loads(opened.read(length))
    try:
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        return sum(
            (int(tensor["data_offsets"][1]) - int(tensor["data_offsets"][0]))
            * (2 if widened and tensor["dtype"] in HALF else 1)
            for tensor in tensors
        )
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file.name} has a damaged header") from error
