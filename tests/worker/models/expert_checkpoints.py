"""Writes checkpoints with experts in layouts that transformers does not save: gpt-oss in MXFP4, and stacked experts."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.worker.models.quantized_checkpoints import State, mxfp4, save

STACKED = re.compile(r"(.*\.mlp\.experts\.(?:gate_up|down)_proj)")
ONE_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def in_mxfp4(folder: Path, *, widened: bool = False) -> Path:
    """Rewrites a gpt-oss checkpoint as the published one: experts in MXFP4, with outputs before inputs.

    widened: writes the dequantized weights instead, as transformers saves them.
    """
    form, state = mxfp4(), load_file(folder / "model.safetensors")
    for name in [name for name in state if STACKED.fullmatch(name)]:
        tensors, numbers = zip(*(form.quantize(expert.T) for expert in state.pop(name)), strict=True)
        if widened:
            state[name] = torch.stack(numbers).mT
        else:
            state[f"{name}_blocks"] = torch.stack([one["weight_blocks"] for one in tensors])
            state[f"{name}_scales"] = torch.stack([one["weight_scales"] for one in tensors])
    save(folder, state)
    if not widened:
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": MXFP4}))
    return folder


def stack_experts(folder: Path) -> Path:
    """Rewrites a checkpoint of Qwen's experts with all experts of a layer in one tensor, gate before up."""
    state: State = load_file(folder / "model.safetensors")
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name in sorted(state, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        if match := ONE_EXPERT.fullmatch(name):
            found.setdefault(match[1], {}).setdefault(match[3], []).append(state.pop(name))
    for module, parts in found.items():
        gate, up, down = (torch.stack(parts[name]) for name in ("gate", "up", "down"))
        state |= {f"{module}.gate_up_proj": torch.cat((gate, up), 1), f"{module}.down_proj": down}
    save(folder, state)
    return folder
