"""Counts the tile instructions of a matmul by its number of rows.

    python -m tests.worker.ops.harness.compare_amx

On a processor with AMX, the product is also compared, bit for bit, with the product of the emulation, which follows
Intel's manual.
"""

import torch
from torch import Tensor

from tests.worker.ops.harness import emulated_amx
from tests.worker.ops.harness.cpu_tiers import EMULATED, HERE, use
from worker.ops.linear import native as linear_native
from worker.ops.linear.native import pack_weight

ROWS = (1, 16, 17, 32, 33, 64, 128, 512, 1024)
N, K = 1024, 1024


def product(which: str, x: Tensor, weight: Tensor) -> Tensor:
    with use(which):
        packed = pack_weight([weight], dtype=weight.dtype)
        emulated_amx.counts()
        return linear_native.linear(x, packed, out_dtype=torch.float32)


def main() -> None:
    weight = torch.randn(N, K).bfloat16()
    print(f"{K} → {N}, one thread: tile loads and stores a product of tiles, products beyond those needed, bits")
    torch.set_num_threads(1)
    for rows in ROWS:
        x = torch.randn(rows, K).bfloat16()
        emulation = product(EMULATED, x, weight)
        made, needed = emulated_amx.counts(), -(-rows // 16) * (N // 16) * (K // 32)
        line = f"{rows:5} {made.loads / made.dots:.3f} {made.stores / made.dots:.3f} {made.dots / needed - 1:.2f} "
        print(line + (bits(product("amx", x, weight), emulation) if "amx" in HERE else "no AMX here"))


def bits(real: Tensor, emulation: Tensor) -> str:
    differ, most = (real != emulation).double().mean(), (real - emulation).abs().max()
    return "the same" if torch.equal(real, emulation) else f"{differ:.1%} differ, by {most:.1e} at most"


if __name__ == "__main__":
    main()
