"""A checkpoint on disk: finding it, its config, its tensors by name. It knows no model; weights.py asks by name.

Files are mapped, and every tensor is copied out of the map into memory of the caller's: machines that page out
idle file pages would stall a model that computes from the map.
"""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "model*.safetensors"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # what weights may be stored as, and the bytes of one


class CheckpointError(ValueError):
    """One sentence naming the file, and the tensor where there is one."""


def resolve(model: str) -> Path:
    """The folder of a checkpoint: `model` itself, or a snapshot of that hub id, downloaded unless it is cached.

    Raises CheckpointError when there is no such folder and the hub does not have it or cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model} is not a folder")
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download  # half a second, and a folder does not need it
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=PATTERNS))
    except (OSError, HFValidationError) as error:  # what the hub raises is an OSError, network errors included
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{model!r} is not a folder here, is not in the local Hugging Face cache, and could not be fetched "
            f"from the hub: {reason[0]}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with the end-of-text ids of generation_config.json where it names any (it knows them better)."""
    config = _json(folder / "config.json")
    if (folder / "generation_config.json").exists():
        ends = _json(folder / "generation_config.json").get("eos_token_id")
        if ends is not None:
            config.get("text_config", config)["eos_token_id"] = ends
    return config


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


class Checkpoint:
    """The tensors of a folder's safetensors files, by name; files stay mapped until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}  # tensor name → open file
        self._paths: dict[str, Path] = {}
        self._open = ExitStack()
        try:
            for path in _files(folder):
                self._add(path)
        except BaseException:
            self._open.close()
            raise

    def _add(self, path: Path) -> None:
        try:
            file = self._open.enter_context(safe_open(path, framework="pt"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a whole safetensors file ({error}); fetch it again") from error
        for name in file.keys():  # noqa: SIM118 (not a dict)
            self._files[name] = file
            self._paths[name] = path

    def names(self) -> list[str]:
        return list(self._files)

    def where(self, name: str) -> Path:
        """The file that holds a tensor, or the folder when none does."""
        return self._paths.get(name, self.folder)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def nbytes(self, name: str) -> int:
        """Stored size; raises CheckpointError for a number format that weights cannot have."""
        part = self._files[name].get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"{self.where(name)}: tensor {name} is stored as {part.get_dtype()}; supported are {', '.join(DTYPES)}"
            )
        return int(torch.Size(part.get_shape()).numel()) * DTYPES[part.get_dtype()]

    def copy(self, name: str, into: Tensor) -> None:
        """Into memory of any device and dtype, of the tensor's shape."""
        into.copy_(self._files[name].get_tensor(name))

    def close(self) -> None:
        self._open.close()


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        names = _json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{folder / INDEX} has no weight_map")
        return [folder / name for name in sorted(set(names.values()))]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}: only safetensors checkpoints are read")
