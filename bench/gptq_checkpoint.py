"""Writes a checkpoint in bfloat16 again with linears in GPTQ's layout: four bits, groups of 128, rounded to nearest.

    python -m bench.gptq_checkpoint FOLDER OUT

FOLDER is one of bench/checkpoints.py.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from worker.kernels.quantized_weight import INT4, quantize_groups

BITS, GROUP, ZERO_POINT = 4, 128, 8
CODES = 32 // BITS  # of an int32
STORED_ZERO_POINTS = sum((ZERO_POINT - 1) << BITS * i for i in range(CODES))  # of an int32; they are stored minus one


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for file in args.folder.glob("*.json"):
        shutil.copy(file, args.out)
    config = json.loads((args.folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": BITS, "group_size": GROUP, "sym": True, "desc_act": False,
        "checkpoint_format": "gptq",
    }  # fmt: skip
    (args.out / "config.json").write_text(json.dumps(config, indent=2))
    written: dict[str, Tensor] = {}
    for name, weight in load_file(args.folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix("weight")
            written |= {module + part: tensor for part, tensor in gptq(weight).items()}
        else:
            written[name] = weight
    save_file(written, args.out / "model.safetensors", metadata={"format": "pt"})


def gptq(weight: Tensor) -> dict[str, Tensor]:
    """Returns the tensors for weight [N, K]: qweight [K / 8, N], qzeros [groups, N / 8], scales [groups, N], g_idx."""
    n, k = weight.shape
    quantized = quantize_groups(weight, INT4, GROUP)
    unsigned = (quantized.codes.T.contiguous().long() ^ ZERO_POINT).view(k // CODES, CODES, n)
    packed = sum(unsigned[:, i] << BITS * i for i in range(CODES))
    assert isinstance(packed, Tensor)
    return {
        "qweight": _int32(packed),
        "qzeros": _int32(torch.full((k // GROUP, n // CODES), STORED_ZERO_POINTS)),
        "scales": quantized.scale.T.half().contiguous(),
        "g_idx": (torch.arange(k) // GROUP).int(),
    }


def _int32(bits: Tensor) -> Tensor:
    """Returns the low 32 bits of int64 numbers from 0 to 2^32 - 1 as int32."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().contiguous()


if __name__ == "__main__":
    main()
