"""Writes a PEFT adapter of a tiny checkpoint as a GGUF file, in the layout of llama.cpp's converter."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from bench.peers.gguf_file import architecture, name_map, stored_name
from bench.peers.gguf_layout import stored_rows


def write_gguf(adapter: Path, base: Path, file: Path, type: str = "F32", **replaced: Any) -> Path:
    """Writes an adapter.

    type: the type of its matrices. replaced: values instead of the adapter's own architecture, kind or alpha
    """
    config = json.loads((base / "config.json").read_text())
    facts = json.loads((adapter / "adapter_config.json").read_text())
    names, kind = name_map(config), gguf.GGMLQuantizationType[type]
    writer = gguf.GGUFWriter(str(file), replaced.get("architecture", architecture(config)))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", replaced.get("kind", "lora"))
    writer.add_array("general.tags", ["a", "tag"])
    writer.add_array("general.numbers", [1, 2, 3])
    writer.add_float32("adapter.lora.alpha", replaced.get("alpha", facts["lora_alpha"]))
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, _, which = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        numbers = tensor.float().numpy()
        rows = stored_rows(f"{module}.weight", numbers, config) if which == "B" else numbers
        stored = np.ascontiguousarray(gguf.quants.quantize(rows, kind))
        writer.add_tensor(
            f"{stored_name(names, f'{module}.weight')}.lora_{which.lower()}", stored,
            raw_shape=stored.shape if stored.dtype == np.uint8 else None, raw_dtype=kind,
        )  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
