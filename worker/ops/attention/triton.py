"""Attention on GPUs: divides the work between the Triton kernels of triton_split.py and triton_prefill.py.

A row is one query token. So a sequence with one row is a decode (or a prompt or chunk of one token).

The bits of a row never depend on the batch, the chunking, padding or the division of work. The keys of a row are cut at
absolute positions: into splits (`split_start`), and splits into blocks of BLOCK_N. `attend_block` computes each split
from an empty state (online softmax over its blocks, in order), and `merge_softmax` merges the splits, in order. A
block or split without visible keys changes no bit: it multiplies by one and adds zero. If a sequence has few rows
(decodes, drafts, a short turn behind a long cached prefix), different programs compute the splits and store their
results, which are then merged. If a sequence has more rows, its tiles are enough to keep the GPU busy. Then one
program computes and merges all splits of a tile, with the same functions in the same order. `divide_work` chooses how
many rows count as few. A sink is added to the sum of a row last, after all splits.

The prefill kernel and the split kernel differ in the height of their tile, but not in the computation of a row. The
matrix products of a row come from the same instruction (64 rows for a group of four warps, as many columns, 16 deep),
over the same columns in the same order. The maximum and sum of a row come from the same four threads. Both kernels use
the same tile where four warps cannot hold 64 rows of two accumulators (head sizes above 128), and without tensor cores
(float32).

The host knows only bounds of lengths, and a CUDA graph is replayed with any lengths. So the programs find their work on
the device (triton_shared.py). A loose bound costs only memory for partial results, and a few programs that end
immediately.

triton_shared.py defines m_i, l_i, acc, `scale` and `cap_scale`. Without sinks, sinks_ptr is None; without a soft cap,
cap_scale is None; and no code is compiled for what is None.
"""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from worker.ops.attention.triton_prefill import _prefill_kernel
from worker.ops.attention.triton_shared import LOG2_E, count_splits, sequence_block
from worker.ops.attention.triton_split import _combine_kernel, _split_kernel
from worker.ops.launch_options import NO_OPTIONS, GpuOptions
from worker.ops.linear.triton_tiles import cdiv, kind_of, multiprocessors, shared_memory
from worker.ops.triton_common import pdl_options

SPLIT_SIZE = 256  # positions of the shortest splits (see triton_shared.py); a multiple of every block_n
SHORT_SPLITS = 32  # how many splits are short; later splits are longer, which limits the memory for partial results
SPLIT_ROWS = 64  # the keys of sequences with up to this many rows are split even in steps with many rows
PARTIAL_BYTES = 256 << 20  # memory for partial results; a sequence with one row is split even if this takes more
SPLIT_PROGRAMS = 4  # programs of _split_kernel for each multiprocessor, which runs two of them at a time
COMBINE_PROGRAMS = 32  # programs of _combine_kernel for each multiprocessor, which runs all 32 at a time
SPLITS_AT_ONCE = 8  # how many partial results a program loads at once when it merges them
# with at least so many bytes of shared memory there are five stages, which take up to 132 KiB; three take up to 99 KiB
FIVE_STAGES_FROM = 160 << 10
NESTED_FROM = 100  # compute capability, see nests_splits
NO_FP_FUSION = {"enable_fp_fusion": False}  # every kernel rounds multiplications and additions as written


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of the prefill kernel and the split kernel, with their warps and pipeline stages.

    block_n: keys of a block
    prefill_m, split_m: rows of a tile: query rows times query heads that share a key head
    overlaps: if true, registers and shared memory suffice for prefill whose softmax overlaps with matrix products
    """

    block_n: int
    prefill_m: int
    prefill_warps: int
    split_m: int
    split_warps: int
    stages: int
    overlaps: bool = False


def choose_tiles(head: int, group: int, dtype: torch.dtype, shared_memory: int) -> Tiles:
    """Returns the tiles, chosen for an H200.

    There are five pipeline stages because keys and values are loaded two blocks ahead, and their page ids two blocks
    earlier still. A GPU with less shared memory than FIVE_STAGES_FROM loads keys and values one block ahead.

    shared_memory: bytes that a program may use. It decides only `stages` and `overlaps`, which change no bits.
    """
    tiles = _large_tiles(head, group, dtype)
    if shared_memory >= FIVE_STAGES_FROM:
        return tiles
    return replace(tiles, stages=min(tiles.stages, 3), overlaps=False)


def _large_tiles(head: int, group: int, dtype: torch.dtype) -> Tiles:
    group_rows = triton.next_power_of_2(group)
    if dtype == torch.float32:
        return Tiles(32, max(16, group_rows), 4, max(16, group_rows), 4, 1)
    if head > 256:  # More rows or more stages would need more registers or shared memory than there are.
        return Tiles(32, max(32, group_rows), 8, max(16, group_rows), 8, 2)
    if head > 128:
        return Tiles(32, max(64, group_rows), 8, max(64, group_rows), 8, 5)
    return Tiles(
        128 if head <= 64 else 64, max(128, group_rows), 8, max(64, group_rows), 4 if group_rows <= 64 else 8, 5, True
    )


@dataclass(frozen=True, slots=True)
class Division:
    """How many programs of each kernel are launched for a step. This depends on shapes and bounds, and affects no bits.

    max_rows: the keys of sequences with up to this many rows are split, the keys of sequences with more rows are not
    places: how many rows have memory for their partial results
    max_splits: the most splits that a row attends to
    split_programs, prefill_programs: programs for each key/value head; 0: the kernel is not launched
    combine_programs: programs for each query head
    """

    max_rows: int
    places: int
    max_splits: int
    split_programs: int
    combine_programs: int
    prefill_programs: int


def divide_work(
    tokens: int, sequences: int, heads: int, kv_heads: int, head: int, max_splits: int, tiles: Tiles, processors: int
) -> Division:
    """Divides the work of a step between the kernels.

    tokens, sequences: how many rows and sequences the step has; processors: the GPU's multiprocessors
    """
    group = heads // kv_heads
    prefill_rows, split_rows = tiles.prefill_m // group, tiles.split_m // group
    most_rows = max(sequences, PARTIAL_BYTES // (4 * max_splits * heads * (head + 2)))
    max_rows = tokens if tokens <= most_rows else most_rows // sequences
    # If there are enough tiles to keep the GPU busy without splits, only short sequences are split.
    if tokens > sequences and kv_heads * (tokens // prefill_rows) >= processors:
        max_rows = min(max_rows, SPLIT_ROWS) if sequences > 1 else 0
    places = min(tokens, sequences * max_rows)
    # With a sliding window, a tile attends to at most one split more than one of its rows.
    items = (places // split_rows + min(sequences, places)) * (max_splits + 1)
    return Division(
        max_rows, places, max_splits,
        split_programs=min(items, cdiv(SPLIT_PROGRAMS * processors, kv_heads)),
        combine_programs=min(places, cdiv(COMBINE_PROGRAMS * processors, heads)),
        prefill_programs=tokens // prefill_rows + min(sequences, tokens // (max_rows + 1)) if tokens > max_rows else 0,
    )  # fmt: skip


def nests_splits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether prefill has a loop over the blocks of each split, which changes no bits.

    From compute capability 10.0 on, the other form spills registers in its loop over all blocks. Older GPUs hold what
    that loop needs, and it loads keys ahead across splits, too. The gain is not measured yet.
    """
    return kind_of(device).capability >= NESTED_FROM and dtype != torch.float32


def without_splits(tokens: int, sequences: int, group: int, max_splits: int, tiles: Tiles) -> Division:
    """Returns a division in which no keys are split: one program attends to all keys of a tile.

    This division is for rows that attend to later keys than their own, because the split kernels find splits by the
    positions of rows.
    """
    return Division(0, 0, max_splits, 0, 0, prefill_programs=tokens // (tiles.prefill_m // group) + sequences)


def attention_triton(
    q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    max_kv_len: int,
    *,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    bidirectional_end: Tensor | None = None,
    options: GpuOptions = NO_OPTIONS,
) -> Tensor:
    """Computes the same as `attention_torch`. max_kv_len: at least the longest of seq_lens

    Sequences without rows are padding. Rows behind the last sequence are padding, too: their output is undefined.
    Reads no tensor on the host. Shapes and max_kv_len decide what is launched, but never affect the bits.
    """
    tokens, heads, head = q.shape
    page, kv_heads = cache_k.shape[1:3]
    sequences = len(seq_lens)
    assert q.stride()[1:] == (head, 1) and 0 < sequences <= tokens and scale > 0 and softcap >= 0
    assert sinks is None or (sinks.shape == (heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())
    _check_caches(q, cache_k, cache_v)
    _check_layout(query_start_loc, seq_lens, page_table)
    out = torch.empty(tokens, heads, head, dtype=q.dtype, device=q.device)
    tiles = choose_tiles(head, heads // kv_heads, q.dtype, shared_memory(q.device))
    max_splits = count_splits(max_kv_len, window, SPLIT_SIZE, SHORT_SPLITS)
    work = divide_work(tokens, sequences, heads, kv_heads, head, max_splits, tiles, multiprocessors(q.device))
    if bidirectional_end is not None:
        assert (
            bidirectional_end.shape == (tokens,)
            and bidirectional_end.dtype == torch.int32
            and bidirectional_end.is_contiguous()
        )
        work = without_splits(tokens, sequences, heads // kv_heads, max_splits, tiles)
    common: dict[str, int | bool] = NO_FP_FUSION | pdl_options(options) | {
        "HEADS": heads, "HEAD": head, "SPLIT_SIZE": SPLIT_SIZE, "SHORT_SPLITS": SHORT_SPLITS, "UNIFORM": window > 0,
        "BLOCK_S": sequence_block(sequences), "BLOCK_D": max(16, triton.next_power_of_2(head)),
    }  # fmt: skip
    attending = common | {"KV_HEADS": kv_heads, "PAGE": page, "BLOCK_N": tiles.block_n, "num_stages": tiles.stages}
    lengths = query_start_loc, seq_lens
    scale_log2, cap_scale = (softcap or scale) * LOG2_E.value, scale / softcap if softcap else None
    window_size = window or 1 << 30
    numbers = scale_log2, window_size, cap_scale, page_table.stride(0), q.stride(0), sequences, work.max_rows
    if work.prefill_programs:
        _prefill_kernel[(kv_heads, work.prefill_programs)](
            q, cache_k, cache_v, out, sinks, bidirectional_end, *lengths, page_table, *numbers,
            ROWS=tiles.prefill_m // (heads // kv_heads), BLOCK_M=tiles.prefill_m, num_warps=tiles.prefill_warps,
            OVERLAP=options.softmax_overlap and tiles.overlaps and cache_k.dtype == q.dtype,
            NESTED=nests_splits(q.device, q.dtype), **attending,
        )  # fmt: skip
    if work.split_programs:
        arrivals = _arrivals(options, tokens, sequences, work.places * kv_heads)
        partial = _partial_results(work.places * work.max_splits * heads, head, q.device)
        merged = (None, None) if arrivals is None else (out, sinks)
        _split_kernel[(kv_heads, work.split_programs)](
            q, cache_k, cache_v, *partial, *merged, arrivals, *lengths, page_table, *numbers, work.max_splits,
            ROWS=tiles.split_m // (heads // kv_heads), SPLITS_AT_ONCE=SPLITS_AT_ONCE, BLOCK_M=tiles.split_m,
            num_warps=tiles.split_warps, **attending,
        )  # fmt: skip
        if arrivals is None:
            _combine_kernel[(heads, work.combine_programs)](
                *partial, out, sinks, *lengths, scale_log2, window_size, sequences, work.max_rows, work.max_splits,
                SPLITS_AT_ONCE=SPLITS_AT_ONCE, num_warps=1, **common,
            )  # fmt: skip
    return out


def _partial_results(count: int, head: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates memory for the m_i, l_i and acc of `count` partial results."""
    m_i, l_i = (torch.empty(count, dtype=torch.float32, device=device) for _ in "ml")
    return m_i, l_i, torch.empty(count * head, dtype=torch.float32, device=device)


def _arrivals(options: GpuOptions, tokens: int, sequences: int, counters: int) -> Tensor | None:
    """Returns counters of finished splits if the last program of a tile shall merge the splits, else None.

    This is for decodes only. A tile of many rows would take long, so _combine_kernel merges its rows in parallel.
    """
    last = options.last_combine and tokens == sequences and options.arrivals is not None
    return options.arrivals if last and options.arrivals is not None and counters <= len(options.arrivals) else None


def _check_caches(q: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
    assert cache_v.shape == cache_k.shape and cache_k.shape[3] == q.shape[2] and q.shape[1] % cache_k.shape[2] == 0
    assert cache_k.is_contiguous() and cache_v.is_contiguous()
    assert cache_k.dtype == cache_v.dtype and cache_k.dtype in (q.dtype, torch.float8_e4m3fn)


def _check_layout(query_start_loc: Tensor, seq_lens: Tensor, page_table: Tensor) -> None:
    sequences = len(seq_lens)
    assert query_start_loc.shape == (sequences + 1,) and page_table.shape[0] == sequences and page_table.stride(1) == 1
    assert query_start_loc.is_contiguous() and seq_lens.is_contiguous()
    assert query_start_loc.dtype == seq_lens.dtype == page_table.dtype == torch.int32
