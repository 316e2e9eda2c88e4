"""Writes random LoRA adapters for the tiny checkpoints, in the layout of PEFT's folders, without using PEFT."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

LINEARS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj", "in_proj",
    "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "w1", "w2", "w3", "c_fc", "c_proj", "input_linear",
    "output_linear", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
)  # fmt: skip


def linears_of(base: Path, targets: Iterable[str] = LINEARS, experts: bool = False) -> dict[str, tuple[int, int]]:
    """Returns the shapes [outputs, inputs] of the linears with these names in all layers.

    experts: if true, the linears of experts are included, and the linears of dense MLPs are left out
    """
    with safe_open(base / "model.safetensors", "pt") as file:
        shapes = {name.removesuffix(".weight"): tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return {
        name: shape for name, shape in shapes.items()
        if name.rpartition(".")[2] in targets and len(shape) == 2
        and (".experts." in name) == (experts and any(part in name for part in (".mlp.", ".feed_forward.", ".mixer.")))
    }  # fmt: skip


def draw_adapter(
    base: Path,
    folder: Path,
    seed: int,
    *,
    r: int = 8,
    targets: Iterable[str] = LINEARS,
    dtype: torch.dtype = torch.float32,
    size: float = 0.3,
    ranks: Mapping[str, int] | None = None,
    experts: bool = False,
    **config: Any,
) -> Path:
    """Writes an adapter with random weights from the seed.

    ranks: end of a module's name → rank of the module; all other modules have rank `r`. experts: if true, the adapter
    changes experts instead of dense MLPs
    """
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in sorted(linears_of(base, targets, experts).items()):
        rank = next((rank for end, rank in (ranks or {}).items() if module.endswith(f".{end}")), r)
        for name, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            drawn = torch.randn(shape, generator=draw) * size / shape[1] ** 0.5
            tensors[f"base_model.model.{module}.lora_{name}.weight"] = drawn.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r, "lora_alpha": 16, "target_modules": sorted(targets),
        "rank_pattern": dict(ranks or {}), "alpha_pattern": {}, "bias": "none", "use_rslora": False,
        "use_dora": False, "modules_to_save": None, "fan_in_fan_out": False, **config,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder
