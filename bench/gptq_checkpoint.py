"""Converts a bfloat16 checkpoint to GPTQ's layout: linears in four bits, groups of 128, rounded to nearest.

    python -m bench.gptq_checkpoint FOLDER OUT [--group 128]

FOLDER is a checkpoint that bench/checkpoints.py made.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from worker.ops.quantized_weight import INT4, quantize_groups

BITS, GROUP, ZERO_POINT = 4, 128, 8
CODES = 32 // BITS  # number of codes in an int32
# an int32 full of zero points; GPTQ stores each zero point minus one
STORED_ZERO_POINTS = sum((ZERO_POINT - 1) << BITS * i for i in range(CODES))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--group", type=int, default=GROUP)
    args = parser.parse_args()
    write(args.folder, args.out, gptq_config(args.group), partial(gptq, group=args.group))


def write(folder: Path, out: Path, config: dict[str, Any], stored: Callable[[Tensor], dict[str, Tensor]]) -> None:
    """Writes a copy of a checkpoint with quantized linears to `out`, and `config` as its quantization_config.
    stored: returns the tensors that replace a linear's weight [N, K].
    """
    out.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.json"):
        shutil.copy(file, out)
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (out / "config.json").write_text(json.dumps(settings, indent=2))
    written: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix("weight")
            written |= {module + part: tensor for part, tensor in stored(weight).items()}
        else:
            written[name] = weight
    save_file(written, out / "model.safetensors", metadata={"format": "pt"})


def gptq_config(group: int) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": BITS, "group_size": group, "sym": True, "desc_act": False,
        "checkpoint_format": "gptq",
    }  # fmt: skip


def gptq(weight: Tensor, group: int = GROUP) -> dict[str, Tensor]:
    """Returns the tensors for weight [N, K]: qweight [K / 8, N], qzeros [groups, N / 8], scales [groups, N], g_idx."""
    n, k = weight.shape
    quantized = quantize_groups(weight, INT4, group)
    unsigned = (quantized.codes.T.contiguous().long() ^ ZERO_POINT).view(k // CODES, CODES, n)
    return {
        "qweight": packed(unsigned, 1),
        "qzeros": _int32(torch.full((k // group, n // CODES), STORED_ZERO_POINTS)),
        "scales": quantized.scale.T.half().contiguous(),
        "g_idx": (torch.arange(k) // group).int(),
    }


def packed(codes: Tensor, dim: int) -> Tensor:
    """Packs int64 codes into int32: one int32 has all CODES codes along `dim`, the first in its lowest bits."""
    words = sum(part << BITS * i for i, part in enumerate(codes.unbind(dim)))
    assert isinstance(words, Tensor)
    return _int32(words)


def _int32(bits: Tensor) -> Tensor:
    """Returns the low 32 bits of int64 numbers from 0 to 2^32 - 1 as int32."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().contiguous()


if __name__ == "__main__":
    main()
