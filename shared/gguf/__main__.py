"""Translates the files of one GGUF model: `python -m shared.gguf model FOLDER FILE...` writes into FOLDER.

With `text` instead of `model` it writes only what a frontend needs, from the first file. Exits with 3 and one sentence
on stderr if the files cannot be served.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from gguf import LlamaFileType
from msgspec.structs import replace

from shared.gguf.config.config import config_of
from shared.gguf.config.pooling import pooling_files
from shared.gguf.config.stated_numbers import write_numbers
from shared.gguf.container import Container
from shared.gguf.errors import GgufError
from shared.gguf.index import Entry, Index, TiledHeads
from shared.gguf.naming import INDEX, NUMBERS
from shared.gguf.text.text_settings import generation_config_of, tokenizer_config_of
from shared.gguf.text.tokenizer import Vocabulary, tokenizer_of

PLAIN = ("F32", "F16", "BF16")
TILED_ARCHITECTURES = ("qwen35", "qwen35moe")  # their converter reorders value heads, if key heads have several


def translate(files: Sequence[Path], folder: Path) -> None:
    """Writes the files of a Hugging Face checkpoint, and the index of the tensors, into the folder.

    Raises GgufError when the model cannot be served, and OSError when the folder cannot be written.
    """
    container = Container.read(files)
    config = config_of(container)
    index = _index(container, files, config)
    numbers = write_numbers(container, config["num_hidden_layers"], folder, len(files))
    if numbers:
        index = replace(index, files=(*index.files, NUMBERS), tensors=index.tensors | numbers)
    if quantization := _quantization(container):
        tiled = msgspec.to_builtins(index.tiled_heads)
        config["quantization_config"] = {"quant_method": "gguf", "kind": quantization, "tiled_heads": tiled}
    _write_text(container, folder, config)
    (folder / INDEX).write_bytes(msgspec.json.encode(index))


def translate_text(files: Sequence[Path], folder: Path) -> None:
    """Writes the files that a frontend needs, from the metadata in the first file."""
    _write_text(Container.read_first(files[0]), folder, {})
    (folder / INDEX).write_bytes(msgspec.json.encode(Index("", 0, 0, (), {})))


def _write_text(container: Container, folder: Path, config: dict[str, Any]) -> None:
    """Writes the files with the tokenizer, and config.json with the ends of texts. INDEX completes the folder."""
    vocabulary = Vocabulary.read(container)
    generation = generation_config_of(vocabulary)
    ends = {name: generation[name] for name in ("bos_token_id", "eos_token_id") if name in generation}
    (folder / "tokenizer.json").write_text(tokenizer_of(vocabulary), encoding="utf-8")
    contents = {
        "config.json": config | ends,
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config_of(vocabulary),
        **pooling_files(container),
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _quantization(container: Container) -> str:
    """Returns the name of the quantization as in file names, "Q4_K_M"; "" if no tensor is quantized."""
    quantized = [tensor for tensor in container.tensors.values() if tensor.type not in PLAIN]
    if not quantized:
        return ""
    try:
        name = LlamaFileType(container.integer("general.file_type", -1)).name.removeprefix("MOSTLY_")
    except ValueError:
        name = ""
    return name if name not in ("", "GUESSED", "ALL_F32", *PLAIN) else max(quantized, key=lambda one: one.nbytes).type


def _index(container: Container, files: Sequence[Path], config: dict[str, Any]) -> Index:
    architecture = container.text("general.architecture")
    drafters = _drafters(container, architecture, config["num_hidden_layers"])
    tensors = {
        name: Entry(files.index(tensor.file), tensor.type, tensor.shape, tensor.offset, tensor.nbytes)
        for name, tensor in container.tensors.items()
        if not name.startswith(drafters)
    }
    tiled = _tiled_heads(config) if architecture in TILED_ARCHITECTURES else None
    paths = tuple(map(str, files))
    return Index(architecture, config["head_dim"], config["num_key_value_heads"], paths, tensors, tiled)


def _drafters(container: Container, architecture: str, layers: int) -> tuple[str, ...]:
    """Returns the prefixes of names of layers that predict several tokens at once. Such layers are not read."""
    every = container.integer(f"{architecture}.block_count")
    return tuple(f"blk.{i}." for i in range(layers, every))


def _tiled_heads(config: dict[str, Any]) -> TiledHeads | None:
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if key_heads < 1 or value_heads % key_heads or value_heads == key_heads:
        return None
    return TiledHeads(key_heads, value_heads // key_heads, config["linear_value_head_dim"])


def main(kind: str, folder: str, *files: str) -> int:
    try:
        KINDS[kind]([Path(file) for file in files], Path(folder))
    except (GgufError, OSError) as error:
        print(error, file=sys.stderr)
        return 3
    return 0


KINDS = {"model": translate, "text": translate_text}

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
