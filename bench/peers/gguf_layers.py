"""Writes a GGUF file with another number of layers: `python -m bench.peers.gguf_layers SOURCE TO LAYERS`.

The layers of SOURCE are taken in turns. So the speed of a format can be measured without quantizing a whole model,
which takes llama.cpp's quantizer minutes in the smallest formats: cut the model to one layer, quantize that, and repeat
it. The layers are equal, but each has memory of its own. What such a model says means nothing.
"""

import re
import sys
from pathlib import Path

import gguf

from shared.config.flags import Parser, positive_int

LAYER = re.compile(r"blk\.(\d+)\.")
SET_BY_WRITER = "GGUF."  # prefix of fields that the reader makes of the file's head


def main(words: list[str]) -> None:
    parser = Parser(prog="python -m bench.peers.gguf_layers", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("to", type=Path)
    parser.add_argument("layers", type=positive_int)
    args = parser.read(words)
    repeat(args.source, args.to, args.layers)


def repeat(source: Path, to: Path, layers: int) -> None:
    read = gguf.GGUFReader(source)
    architecture = read.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(to), architecture)
    for name, field in read.fields.items():
        if name == f"{architecture}.block_count":
            writer.add_block_count(layers)
        elif name != "general.architecture" and not name.startswith(SET_BY_WRITER):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=inner[-1] if inner else None)
    has = max(int(found[1]) for tensor in read.tensors if (found := LAYER.match(tensor.name))) + 1
    for tensor in read.tensors:
        if not LAYER.match(tensor.name):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for layer in range(layers):
        first = f"blk.{layer % has}."
        for tensor in read.tensors:
            if tensor.name.startswith(first):
                name = f"blk.{layer}.{tensor.name.removeprefix(first)}"
                writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
