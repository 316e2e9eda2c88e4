"""Translates the files of one GGUF model: `python -m shared.gguf model FOLDER HOW TOWER FILE...` writes into FOLDER.

TOWER is the file of a vision tower, or empty. HOW is `given` or `found`. A tower that is `given` must fit the model. If
a `found` tower does not fit, the text model is served without it, and config.json states the reason. With `text`
instead of `model`, the command writes only what a frontend needs, from the first file and the file of the tower. Exits
with one sentence on stderr: with 3 if the files cannot be served, with 4 if FOLDER cannot be written.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from gguf import LlamaFileType
from msgspec.structs import replace

from shared.gguf.config import config_of, outline_of, pooling_files, write_numbers
from shared.gguf.config_vision import OF_TOWER, NotServed, Vision, read_vision
from shared.gguf.container import Container, StoredTensor
from shared.gguf.index import Entry, Index, TiledHeads
from shared.gguf.naming import CANNOT_WRITE, INDEX, NUMBERS, GgufError
from shared.gguf.tokenizer import Vocabulary, generation_config_of, tokenizer_config_of, tokenizer_of
from shared.gguf.translated import TowerFile

PLAIN = ("F32", "F16", "BF16")
# keys of config.json that hold for the text model and the tower
OF_BOTH = ("tie_word_embeddings", "dtype", "quantization_config")
MTP_ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next", "glm4moe")  # models whose MTP heads are read
TILED_ARCHITECTURES = ("qwen35", "qwen35moe")  # architectures whose files have another order of value heads


def translate(files: Sequence[Path], folder: Path, tower: TowerFile | None) -> None:
    """Writes the files of a Hugging Face checkpoint, and the index of the tensors, into the folder.

    Raises GgufError when the model cannot be served, and OSError when the folder cannot be written.
    """
    container = Container.read(files)
    config = config_of(container)
    index = _index(container, files, config)
    if heads := _count_heads(container, config["num_hidden_layers"]):
        config["num_nextn_predict_layers"] = heads
    numbers = write_numbers(container, config["num_hidden_layers"], folder, len(files))
    if numbers:
        index = replace(index, files=(*index.files, NUMBERS), tensors=index.tensors | numbers)
    vision, reason = _vision(container, tower)
    if tower is not None and vision is not None:
        index = _with_tower(index, tower.path, vision)
    tensors = [*container.tensors.values(), *(vision.tensors.values() if vision else ())]
    if quantization := _quantization(tensors, container):
        tiled = msgspec.to_builtins(index.tiled_heads)
        config["quantization_config"] = {"quant_method": "gguf", "kind": quantization, "tiled_heads": tiled}
    _write_text(container, folder, _seeing(config, vision, reason), vision)
    (folder / INDEX).write_bytes(msgspec.json.encode(index))


def translate_text(files: Sequence[Path], folder: Path, tower: TowerFile | None) -> None:
    """Writes the files that a frontend needs, from the metadata of the first file and of the tower's file."""
    container = Container.read_first(files[0])
    vision, reason = _vision(container, tower)
    _write_text(container, folder, _seeing(outline_of(container), vision, reason), vision)
    (folder / INDEX).write_bytes(msgspec.json.encode(Index("", 0, 0, (), {})))


def _vision(container: Container, tower: TowerFile | None) -> tuple[Vision | None, str]:
    """Returns what a tower adds to the model; or None, and the reason why the text model is served without it."""
    if tower is None:
        return None, ""
    try:
        return read_vision(container, Container.read([tower.path])), ""
    except GgufError as error:
        if tower.given and not isinstance(error, NotServed):
            raise
        return None, str(error)


def _seeing(config: dict[str, Any], vision: Vision | None, reason: str) -> dict[str, Any]:
    """Returns config.json of a text model with a tower. reason: why the tower is not served; empty if it is"""
    if vision is None:
        return config | ({"vision_config": {"not_served": reason}} if reason else {})
    whole = {name: config[name] for name in OF_BOTH if name in config}
    generator = {"architectures": ["GgufForConditionalGeneration"]}
    return {**whole, **generator, **vision.config, "text_config": config}


def _with_tower(index: Index, file: Path, vision: Vision) -> Index:
    """Adds the tensors of the tower; they replace any tensors of a tower in the text model's files."""
    own = {name: entry for name, entry in index.tensors.items() if not name.startswith(OF_TOWER)}
    number = len(index.files)
    added = {name: Entry(number, one.type, one.shape, one.offset, one.nbytes) for name, one in vision.tensors.items()}
    heads = vision.config["vision_config"]["num_attention_heads"]
    files = (*index.files, str(file))
    return replace(index, files=files, tensors=own | added, projector=vision.kind, tower_heads=heads)


def _write_text(container: Container, folder: Path, config: dict[str, Any], vision: Vision | None) -> None:
    """Writes the tokenizer files, and config.json with the ids that end a text. The caller writes INDEX last."""
    vocabulary = Vocabulary.read(container)
    generation = {} if outline_of(container) else generation_config_of(vocabulary)
    ends = {name: generation[name] for name in ("bos_token_id", "eos_token_id") if name in generation}
    (folder / "tokenizer.json").write_text(tokenizer_of(vocabulary), encoding="utf-8")
    contents = {
        "config.json": config | ends,
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config_of(vocabulary) | dict(vision.named if vision else {}),
        **({"preprocessor_config.json": vision.processor} if vision else {}),
        **pooling_files(container),
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _quantization(tensors: Sequence[StoredTensor], container: Container) -> str:
    """Returns the quantization's name as in file names, for example "Q4_K_M"; "" if no tensor is quantized."""
    quantized = [tensor for tensor in tensors if tensor.type not in PLAIN]
    if not quantized:
        return ""
    try:
        name = LlamaFileType(container.integer("general.file_type", -1)).name.removeprefix("MOSTLY_")
    except ValueError:
        name = ""
    return name if name not in ("", "GUESSED", "ALL_F32", *PLAIN) else max(quantized, key=lambda one: one.nbytes).type


def _index(container: Container, files: Sequence[Path], config: dict[str, Any]) -> Index:
    architecture = container.text("general.architecture")
    drafters = _unread_heads(container, config["num_hidden_layers"])
    tensors = {
        name: Entry(files.index(tensor.file), tensor.type, tensor.shape, tensor.offset, tensor.nbytes)
        for name, tensor in container.tensors.items()
        if not name.startswith(drafters)
    }
    tiled = _tiled_heads(config) if architecture in TILED_ARCHITECTURES else None
    paths = tuple(map(str, files))
    return Index(architecture, config["head_dim"], config["num_key_value_heads"], paths, tensors, tiled)


def _count_heads(container: Container, layers: int) -> int:
    """Returns the number of readable MTP heads, which stand behind the model's layers."""
    architecture = container.text("general.architecture")
    return container.integer(f"{architecture}.block_count") - layers if architecture in MTP_ARCHITECTURES else 0


def _unread_heads(container: Container, layers: int) -> tuple[str, ...]:
    """Returns the prefixes of the tensor names of MTP heads that cannot be read."""
    architecture = container.text("general.architecture")
    every = container.integer(f"{architecture}.block_count")
    return tuple(f"blk.{i}." for i in range(layers + _count_heads(container, layers), every))


def _tiled_heads(config: dict[str, Any]) -> TiledHeads | None:
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if key_heads < 1 or value_heads % key_heads or value_heads == key_heads:
        return None
    return TiledHeads(key_heads, value_heads // key_heads, config["linear_value_head_dim"])


def main(kind: str, folder: str, how: str, tower: str, *files: str) -> int:
    beside = TowerFile(Path(tower), how == "given") if tower else None
    try:
        KINDS[kind]([Path(file) for file in files], Path(folder), beside)
    except GgufError as error:
        print(error, file=sys.stderr)
        return 3
    except OSError as error:  # from writing: a file that cannot be read is a GgufError
        print(f"{folder}: {error.strerror}", file=sys.stderr)
        return CANNOT_WRITE
    return 0


KINDS = {"model": translate, "text": translate_text}

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
