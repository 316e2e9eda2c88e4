"""Compiles the sampling kernels for 128,256 tokens: no kernel spills a register; several fit on a multiprocessor."""

from bench.gpu.offline.triton_offline import Variant, usage
from worker.ops.sampling import triton as sample
from worker.ops.sampling import triton_top_k_top_p as top_k_top_p

F, N, L = "*fp32", "*i32", "*i64"
SIZES = ["i32"] * 3  # stride, width, parts
ROW_PARAMS = [F, L, F, *SIZES]  # temperature, top_k, top_p
DRAW = {"USE_LIBDEVICE": True, "PART_SIZE": 2048, "BLOCK_PARTS": 64}
COUNT = DRAW | {"MAX_ONE_PASS_CANDIDATES": 2048}
LIMIT = {
    "MAX_ONE_PASS_CANDIDATES": 2048,
    "USE_LIBDEVICE": True,
    "MAX_LISTED_KEYS": 16384,
    "BLOCK": 2048,
    "BLOCK_PARTS": 64,
}
WARPS = {warps: {"num_warps": warps} for warps in (4, 8, 16)}
ODD = ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr", "parts")
VARIANTS = [
    Variant(
        sample._max_kernel, [F, L, F, L, N, *SIZES],
        {"FILTERED": True, "STATS_PER_ROW": 32, "PART_SIZE": 2048}, WARPS[8], ODD,
    ),
    Variant(top_k_top_p._count_kernel, [F, L, F, F, L, *ROW_PARAMS], COUNT | {"PASS": 0, "TILE": 512}, WARPS[4], ODD),
    Variant(top_k_top_p._count_kernel, [F, L, F, F, L, *ROW_PARAMS], COUNT | {"PASS": 1, "TILE": 512}, WARPS[4], ODD),
    Variant(
        top_k_top_p._collect_kernel, [F, L, F, L, N, N, *ROW_PARAMS], COUNT | {"MAX_LISTED_KEYS": 16384}, WARPS[8], ODD
    ),
    Variant(top_k_top_p._limit_kernel, [F, L, F, L, N, N, N, L, *ROW_PARAMS], LIMIT, WARPS[16], ODD),
    Variant(sample._weight_sum_kernel, [F, L, N, L, N, F, F, *SIZES], DRAW | {"FILTERED": True}, WARPS[8], ODD),
    Variant(
        sample._draw_kernel, [F, L, N, L, L, N, L, F, F, L, L, *SIZES],
        DRAW | {"FILTERED": True, "GREEDY": False}, WARPS[8], ODD,
    ),
]  # fmt: skip


def check() -> None:
    for variant in VARIANTS:
        used = usage(variant.compiled())
        assert used.stack == 0 and used.registers <= 128, (variant, used)
        print(variant.kernel.__name__, used)


if __name__ == "__main__":
    check()
