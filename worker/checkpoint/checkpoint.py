"""Finds a checkpoint on disk and reads its config and its tensors by name. Contains nothing about models.

Every tensor is copied into the caller's memory, from the mapped file or through staging.py. A model that computes
directly from the mapped file would stall on machines that page out idle file pages.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.gguf.index import read_index
from shared.gguf.naming import HUB_NAME, GgufError, is_translation, local_model
from shared.gguf.naming import INDEX as GGUF_INDEX
from shared.gguf.translated import check_not_only_gguf, fetch_model, tower_file, translated
from shared.hf_hub import CHECKPOINT_FILES, HubError, Progress, fetch
from shared.log import MAX_SHOWN, on_one_line
from shared.weight_formats import folder_problem, other_format
from worker.checkpoint.staging import Extent, Staging

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MODELOPT = "hf_quant_config.json"
MAX_REASON = 500  # how many characters of a library's message about a file, which may repeat its names, are repeated
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    # The formats in this line are only for quantized weights, and I64 is only for ids.
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
}  # fmt: skip


class CheckpointError(ValueError):
    """The checkpoint cannot be served. The message is one sentence that names the file and possibly the tensor."""


class UnsupportedModel(CheckpointError):
    """The config needs something unsupported. The message is one sentence: what is not supported, and what is."""


def resolve(
    model: str,
    revision: str = "",
    *,
    mmproj: str = "",
    prefer_cache: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> Path:
    """Returns the folder of a checkpoint, from the name of a model.

    model: a folder; a GGUF file or a folder with one; a hub id; or `org/repository:NAME` for a GGUF file on the hub.
        A GGUF file is translated. A model on the hub is downloaded unless it is cached.
    mmproj: the file of a GGUF model's vision tower; empty: the tower's file beside the model, if there is one
    prefer_cache: use a complete cached copy without asking the hub for a newer one; see `shared.hf_hub`

    Raises CheckpointError when there is no such model, the hub cannot be reached, or a GGUF file cannot be served.
    """
    try:
        return _local(model, mmproj) or _from_hub(model, revision, mmproj, prefer_cache, on_progress)
    except (GgufError, HubError) as error:
        raise CheckpointError(str(error)) from error


def _local(model: str, mmproj: str) -> Path | None:
    path = Path(model).expanduser()
    if (files := local_model(path)) is not None:
        return translated(files, tower=tower_file(files, mmproj))
    if path.is_dir():
        return path if is_translation(path) else _without_index(path)
    if path.exists() or not (HUB_ID.fullmatch(model) or HUB_NAME.fullmatch(model)):
        raise CheckpointError(f"{model} is neither a folder nor a GGUF file")
    return None


def _without_index(folder: Path) -> Path:
    """Returns the folder. Raises CheckpointError if it has an index of GGUF files.

    The paths in such an index may lead to any file of this machine, so only `translated` may make such an index.
    """
    if (folder / GGUF_INDEX).exists():
        raise CheckpointError(f"{folder / GGUF_INDEX} must not exist: only the cache of translated GGUF files has one")
    return folder


def _from_hub(model: str, revision: str, mmproj: str, prefer_cache: bool, on_progress: Progress) -> Path:
    if HUB_NAME.fullmatch(model):
        files, tower = fetch_model(
            model, revision, mmproj=mmproj, prefer_cache=prefer_cache, on_progress=on_progress
        )  # fmt: skip
        return translated(files, tower=tower)
    fetched = partial(fetch, model, CHECKPOINT_FILES, revision=revision, on_progress=on_progress)
    if prefer_cache and _is_complete(folder := _without_index(fetched(prefer_cache=True))):
        return folder
    folder = _without_index(fetched())
    if not _is_complete(folder):
        names = check_not_only_gguf(model, revision)
        if not any(name.endswith(".safetensors") for name in names) and (problem := other_format(repr(model), names)):
            raise CheckpointError(problem)
    return folder


def _is_complete(folder: Path) -> bool:
    try:
        return all(path.exists() for path in weight_files(folder))
    except CheckpointError:
        return False


def stored_bytes(folder: Path) -> int:
    """Returns the total size of the weight files in bytes. Raises CheckpointError when there are none."""
    return sum(path.stat().st_size for path in weight_files(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json. Uses the end-of-text ids of generation_config.json if it has any: they are more accurate.

    Old exports of modelopt have the quantization's settings in a file of their own.
    """
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} is an adapter (LoRA), not a model: merge it into its base model first")
    config = _json(folder / "config.json")
    if (folder / "generation_config.json").exists():
        ends = _json(folder / "generation_config.json").get("eos_token_id")
        if ends is not None:
            inner = config.get("text_config")
            (inner if isinstance(inner, dict) else config)["eos_token_id"] = ends
    if not config.get("quantization_config") and (folder / MODELOPT).exists():
        config["quantization_config"] = {"quant_method": "modelopt", **_json(folder / MODELOPT)}
    return config


class _Token(msgspec.Struct):
    id: int
    content: str


class _Added(msgspec.Struct):
    """The added tokens: the only part of tokenizer.json that this module reads."""

    added_tokens: list[_Token] = []


def tokenizer_ends(folder: Path) -> tuple[int, ...]:
    """Returns the id of the end-of-text token that tokenizer_config.json names, if it names one.

    A chat model often has another end-of-text token than its base model. Then the tokenizer names the new token, but
    config.json often still names the base model's token.
    """
    settings = folder / "tokenizer_config.json"
    eos_token = _json(settings).get("eos_token") if settings.exists() else None
    text = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    try:
        added = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_Added).added_tokens
    except (OSError, msgspec.DecodeError):
        return ()  # the code that needs the tokenizer reports that it is missing or broken
    return tuple(token.id for token in added if token.content == text)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is: in the open `file` at `path`, under the name `stored`.

    expert: the tensor is only this entry along the first dimension of the stored tensor; None: the tensor is the whole
        stored tensor
    extent: the tensor's byte range, for staging
    """

    path: Path
    file: Any
    stored: str
    expert: int | None = None
    extent: Extent | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.file.get_slice(self.stored).get_shape())
        return shape if self.expert is None else shape[1:]

    def parts(self) -> dict[str, "_Place"]:
        """Returns the place of each expert's tensor, if the tensor here holds all experts of a layer; else {}."""
        names = names_of_experts(self.stored, self.shape)
        extents = [None] * len(names) if self.extent is None else self.extent.parts(len(names))
        places = enumerate(zip(names, extents, strict=True))
        return {name: _Place(self.path, self.file, self.stored, expert, extent) for expert, (name, extent) in places}

    def tensor(self) -> Tensor:
        found: Tensor = self.file.get_slice(self.stored)[... if self.expert is None else self.expert]
        return found


class Checkpoint:
    """Reads the tensors of the safetensors files in a folder by name. The files stay open until `close`.

    A stored tensor of all experts of a layer is read as one tensor for each expert.
    """

    def __init__(self, folder: Path, staging: Staging | None = None) -> None:
        """staging: reads the tensors, and is closed by close(); None: tensors are copied from the mapped files"""
        self.folder = folder
        self._places: dict[str, _Place] = {}
        self._staging = staging
        self._open = ExitStack()
        try:
            for path in weight_files(folder):
                self._add(path)
            if staging is not None:
                self._open.callback(staging.close)  # this callback runs before the staged files are closed
        except BaseException:
            self._open.close()
            raise

    def _add(self, path: Path) -> None:
        extents: dict[str, Extent] = {}
        try:
            file = self._open.enter_context(safe_open(path, framework="pt"))
            if self._staging is not None:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._open.callback(os.close, fd)
                extents = _extents(fd)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except (SafetensorError, OSError) as error:
            reason = on_one_line(str(error), MAX_REASON)
            raise CheckpointError(f"{path} is not a complete safetensors file ({reason}); fetch it again") from error
        for name in file.keys():  # noqa: SIM118 (not a dict)
            place = _Place(path, file, name, extent=extents.get(name))
            self._places |= place.parts() or {name: place}

    def names(self) -> list[str]:
        return list(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def where(self, name: str) -> Path:
        """Returns the file that holds a tensor, or the folder if no file holds it."""
        return self._places[name].path if name in self._places else self.folder

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def format(self, name: str) -> str:
        """Returns the name of the number format of a stored tensor, as in the file: F32, BF16, I8, …"""
        place = self._places[name]
        return str(place.file.get_slice(place.stored).get_dtype())

    def nbytes(self, name: str) -> int:
        """Returns the size of a stored tensor in bytes. Its format must be one of DTYPES."""
        return torch.Size(self.shape(name)).numel() * DTYPES[self.format(name)].itemsize

    def expect(self, names: Iterable[str]) -> None:
        """Announces which tensors copy() will be called with next, in this order, so that they can be read ahead."""
        if self._staging is not None:
            self._staging.expect(self._extent(name) for name in names)

    def copy(self, name: str, into: Tensor) -> None:
        """Copies a tensor into contiguous memory of the same shape, on any device and of any dtype.

        On a GPU the copy may still run when this method returns, but it ends before any kernel launched later starts.

        Raises CheckpointError when the file cannot be read.
        """
        if self._staging is None:
            into.copy_(self._places[name].tensor())
            return
        try:
            self._staging.copy(self._extent(name), DTYPES[self.format(name)], into)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{self.where(name)}: tensor {name} cannot be read: {reason}") from error

    def _extent(self, name: str) -> Extent:
        extent = self._places[name].extent
        assert extent is not None
        return extent

    def close(self) -> None:
        self._open.close()


def _extents(fd: int) -> dict[str, Extent]:
    """Returns the byte range of each tensor in a safetensors file.

    Such a file consists of the header's length (8 bytes), the header in JSON, and the tensors.
    """
    begin = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
    header = json.loads(os.pread(fd, begin - 8, 8))
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: Extent(fd, begin + first, end - first) for name, (first, end) in places.items()}


def check_file_name(name: object, where: str) -> None:
    """Raises CheckpointError if `name` is a path: a path may lead to any file of this machine.

    A symbolic link in the folder itself may lead elsewhere, as in the hub's cache.
    where: the place of the name in a file, with which the error message begins
    """
    if not isinstance(name, str) or not name or name in (".", "..") or any(char in name for char in "/\\\0"):
        shown = repr(name)[:MAX_SHOWN]
        raise CheckpointError(f"{where} names {shown}, which is not the name of a file in this folder")


def weight_files(folder: Path) -> list[Path]:
    """Returns the paths of the weight files, some of which may not exist. Raises CheckpointError if there is no path at
    all.
    """
    if (folder / GGUF_INDEX).exists():
        return [folder / file for file in read_index(folder).files]
    if (folder / INDEX).exists():
        names = _json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{folder / INDEX} has no weight_map")
        for tensor, name in names.items():
            check_file_name(name, f"{folder / INDEX}: weight_map: {tensor[:MAX_SHOWN]!r}")
        return [folder / name for name in sorted(set(names.values()))]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if problem := folder_problem(folder):
        raise CheckpointError(problem)
    others = ", ".join(sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))[:3])
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}, but {others}: no other names are read")


# Cuts a tensor that holds all experts of a layer, as some checkpoints store them, into one tensor for each expert.
#
# So each expert's tensors have names of their own in every checkpoint, and experts are read, counted and checked one
# by one. For example, `mlp.experts.gate_up_proj_blocks` [E, N, K / 32, 16] of gpt-oss is read as
# `mlp.experts.0.gate_up_proj.weight_blocks` [N, K / 32, 16] for expert 0, and so on.

KINDS: Mapping[str | None, str] = {
    None: "weight", "bias": "bias", "blocks": "weight_blocks", "scales": "weight_scales",
    "scale": "scale", "input_scale": "input_scale", "scale_inv": "weight_scale_inv",
    "activation_scale": "activation_scale",
}  # fmt: skip
# A name with a number after `experts` does not match: it belongs to a single expert.
STACKED = re.compile(rf"(.+\.experts)\.([a-z]\w*?)(?:_({'|'.join(kind for kind in KINDS if kind)}))?")
GRANITE = re.compile(r"(.+\.block_sparse_moe\.(?:in|out)put_linear)\.weight")
# kinds of which an expert may have one number: the stored tensor is then a vector
ONE_NUMBER = ("scale", "input_scale", "scale_inv", "activation_scale")
MOST = 4096  # the most experts of a layer; a tensor with more keeps its own name and is refused later


def names_of_experts(name: str, shape: tuple[int, ...]) -> list[str]:
    """Returns the names of the experts' tensors [...] inside a stored tensor [E, ...]; [] for any other tensor."""
    found, granite = STACKED.fullmatch(name), GRANITE.fullmatch(name)
    dimensions = 1 if found is not None and found[3] in ONE_NUMBER else 2
    if len(shape) < dimensions or not 0 < shape[0] <= MOST:
        return []
    if granite is not None:
        return [f"{granite[1]}.{expert}.weight" for expert in range(shape[0])]
    if found is None:
        return []
    return [f"{found[1]}.{expert}.{found[2]}.{KINDS[found[3]]}" for expert in range(shape[0])]


# Renames the tensors of a checkpoint whose names no loader knows.


class RenamedTensors:
    """The tensors of a checkpoint under other names. origin: other name → name in the checkpoint"""

    def __init__(self, stored: "Checkpoint", origin: Mapping[str, str]) -> None:
        self._stored, self._origin = stored, origin

    @property
    def folder(self) -> Path:
        return self._stored.folder

    def names(self) -> list[str]:
        return list(self._origin)

    def __contains__(self, name: str) -> bool:
        return name in self._origin

    def where(self, name: str) -> Path:
        """Returns the file that holds a tensor, or the folder if no file holds it."""
        return self._stored.where(self._origin.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(self._origin[name])

    def format(self, name: str) -> str:
        """Returns the number format in which a tensor is stored: F32, BF16, F16 or another one."""
        return self._stored.format(self._origin[name])

    def nbytes(self, name: str) -> int:
        """Returns the size of a stored tensor in bytes."""
        return self._stored.nbytes(self._origin[name])

    def expect(self, names: Iterable[str]) -> None:
        """Announces which tensors copy() will be called with next, in this order, so that they can be read ahead."""
        self._stored.expect(self._origin[name] for name in names)

    def copy(self, name: str, into: Tensor) -> None:
        """Copies a stored tensor into contiguous memory of the same shape, on any device and of any dtype."""
        self._stored.copy(self._origin[name], into)

    def close(self) -> None:
        self._stored.close()
