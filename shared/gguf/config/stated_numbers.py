"""Writes small tensors that GGUF files state as numbers in their metadata to a file beside the index.

For example, Apertus states the parameters of its activation: one list per parameter, with an entry for each layer.
"""

import struct
from pathlib import Path

from shared.gguf.container import Container
from shared.gguf.errors import GgufError
from shared.gguf.index import Entry
from shared.gguf.naming import NUMBERS

PARAMETERS: dict[str, tuple[int, ...]] = {  # a tensor's name in the metadata and in a layer → shape in Hugging Face
    "xielu.alpha_p": (1,), "xielu.alpha_n": (1,), "xielu.beta": (), "xielu.eps": (),
}  # fmt: skip


def write_numbers(container: Container, layers: int, folder: Path, file: int) -> dict[str, Entry]:
    """Writes the stated numbers into the folder as float32. Returns their places. file: index in Index.files."""
    found, numbers = {}, list[float]()
    for key, shape in PARAMETERS.items():
        if key not in container.metadata:
            continue
        for layer, number in enumerate(_by_layer(container, key, layers)):
            found[f"blk.{layer}.{key}"] = Entry(file, "F32", shape, 4 * len(numbers), 4)
            numbers.append(number)
    if numbers:
        (folder / NUMBERS).write_bytes(struct.pack(f"<{len(numbers)}f", *numbers))
    return found


def _by_layer(container: Container, key: str, layers: int) -> list[float]:
    if not isinstance(container.metadata[key], list):
        return [container.number(key)] * layers
    stated: list[float] = container.entries(key, int | float)
    if len(stated) != layers:
        raise GgufError(f"{container.name}: {key} has {len(stated)} numbers for {layers} layers")
    return stated
