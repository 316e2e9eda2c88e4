"""Dequantizes the model of a GGUF file to a safetensors checkpoint in float32."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.gguf.naming import INDEX
from shared.gguf.translated import translated
from worker.checkpoint.stored_weight import Shape, WeightSource
from worker.models.load import open_source
from worker.ops.quantized_weight import QuantizedWeight


def write_dequantized(gguf: Path, folder: Path) -> None:
    """Writes config and tokenizer as Sluice translates them from the GGUF file, and the dequantized weights."""
    served = translated([gguf])
    shutil.copytree(served, folder, ignore=shutil.ignore_patterns(INDEX), dirs_exist_ok=True)
    with closing(open_source(served, None)) as source:
        weights = {name: _float32(source, name) for name in source.tensors.names()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((served / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2))


def _float32(source: WeightSource, name: str) -> Tensor:
    def read(name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        into = torch.empty(shape, dtype=dtype)
        source.tensors.copy(name, into)
        return into

    found = source.weight(name, source.tensors.shape(name)).read(read, torch.float32)
    return found.dequantize(torch.float32) if isinstance(found, QuantizedWeight) else found
