"""The kernels of sampling, for 128,256 tokens: none spills a register, and each leaves room for others beside it."""

from tests.worker.kernels.harness.triton_offline import Variant, usage
from worker.kernels.gpu import sample, top_k_top_p

F, N, L = "*fp32", "*i32", "*i64"
SIZES = ["i32"] * 3  # stride, width, parts
WISH = [F, L, F, *SIZES]  # temperature, top_k, top_p
DRAW = {"LIBRARY": True, "PART": 2048, "BLOCK_S": 64}
CUT = DRAW | {"FEW": 2048}
SETTLE = {"FEW": 2048, "LIBRARY": True, "LISTED": 16384, "BLOCK": 2048, "BLOCK_S": 64}
WARPS = {warps: {"num_warps": warps} for warps in (4, 8, 16)}
ODD = ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr", "parts")
VARIANTS = [
    Variant(
        sample._peak_kernel, [F, L, F, L, N, *SIZES], {"CUT": True, "STATS": 32, "PART": 2048}, WARPS[8], ODD
    ),
    Variant(top_k_top_p._count_kernel, [F, L, F, F, L, *WISH], CUT | {"PASS": 0, "TILE": 512}, WARPS[4], ODD),
    Variant(top_k_top_p._count_kernel, [F, L, F, F, L, *WISH], CUT | {"PASS": 1, "TILE": 512}, WARPS[4], ODD),
    Variant(top_k_top_p._collect_kernel, [F, L, F, L, N, N, *WISH], CUT | {"LISTED": 16384}, WARPS[8], ODD),
    Variant(top_k_top_p._settle_kernel, [F, L, F, L, N, N, N, L, *WISH], SETTLE, WARPS[16], ODD),
    Variant(sample._mass_kernel, [F, L, N, L, N, F, F, *SIZES], DRAW | {"CUT": True}, WARPS[8], ODD),
    Variant(
        sample._pick_kernel, [F, L, N, L, L, N, L, F, F, L, L, *SIZES],
        DRAW | {"CUT": True, "GREEDY": False}, WARPS[8], ODD,
    ),
]  # fmt: skip


def check() -> None:
    for variant in VARIANTS:
        used = usage(variant.compiled())
        assert used.stack == 0 and used.registers <= 128, (variant, used)
        print(variant.kernel.__name__, used)
