"""Attention of the C library agrees with plain PyTorch, and the bits of a row depend on no other row."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pairs import in_pairs
from tests.worker.ops.harness.cpu_tiers import (
    DTYPES,
    FUNCTIONS,
    HERE,
    as_written,
    close,
    dtypes,
    needs_library,
    tier,  # noqa: F401
)
from worker.ops.attention import native as attention_native
from worker.ops.attention.reference import attention_torch
from worker.ops.paged_kv import CODED, FOUR_BITS, quantize_rows, row_dtypes, row_elements

pytestmark = [needs_library, pytest.mark.usefixtures("tier")]
Rows = tuple[int, int, int]  # (sequence, from, to): a chunk of the sequence


@dataclass(frozen=True)
class Story:
    """Sequences with their whole q, k and v, from which tests make steps with any chunks and pages."""

    q: list[Tensor]  # queries of each sequence, [kv_len, Hq, D]
    k: list[Tensor]
    v: list[Tensor]
    sinks: Tensor | None = None
    softcap: float = 0.0
    # by dtype: k and v in codes, made on first use
    in_codes: dict[torch.dtype, list[list[Tensor]]] = field(default_factory=dict)

    def kept(self, codes: torch.dtype | None) -> list[list[Tensor]]:
        """Returns k and v with the rounding of a cache."""
        if codes is None:
            return [self.k, self.v]
        if codes not in self.in_codes:
            self.in_codes[codes] = [
                [quantize_rows(x, row) for x in part]
                for part, row in zip((self.k, self.v), row_dtypes(codes), strict=True)
            ]
        return self.in_codes[codes]

    def step(
        self,
        *rows: Rows,
        page: int = 16,
        window: int = 0,
        plain: bool = False,
        codes: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Returns one step's attention. Unwritten memory is NaN, and rows of q are strided. codes: the cache's dtype"""
        heads, d = self.k[0].shape[1:]
        counts = [-(-to // page) for _, _, to in rows]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(7)) + 1
        table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
        caches = [
            torch.empty(sum(counts) + 1, page, heads, row_elements(d, row, "cpu"), dtype=row)
            for row in row_dtypes(codes or self.q[0].dtype)
        ]
        for cache in caches:
            cache.view(torch.uint8).fill_(255)  # NaN in every format, as a scale of codes, too
        for line, own, (s, _, to) in zip(table, order.split(counts), rows, strict=True):
            line[: len(own)] = own
            slots = (own[:, None] * page + torch.arange(page)).flatten()[:to]
            for cache, whole in zip(caches, self.kept(codes), strict=True):
                cache.view(torch.uint8).flatten(0, 1)[slots] = whole[s][:to].view(torch.uint8)
        starts = torch.tensor([0, *(to - begin for _, begin, to in rows)]).cumsum(0).int()
        q = torch.cat([self.q[s][begin:to] for s, begin, to in rows])
        q = torch.cat([q, torch.full_like(q, float("nan"))], 1)[:, : q.shape[1]]
        kv_lens = torch.tensor([to for _, _, to in rows], dtype=torch.int32)
        how: dict[str, Any] = {"scale": d**-0.5, "window": window, "sinks": self.sinks, "softcap": self.softcap}
        if plain:
            # in float32, because bf16 would round keys and values again
            longest, wide = int(kv_lens.max()), q.float() if codes else q
            out = attention_torch(wide, *caches, starts, kv_lens, table, longest, **how)
        else:
            caches = as_written(*caches)
            out = attention_native.attention(q, *caches, starts, kv_lens, table, **how)
        return list(out.split(starts.diff().tolist()))


def story(lengths: list[int], heads: int, kv_heads: int, d: int, dtype: torch.dtype, sinks: bool = False) -> Story:
    """Draws sequences.

    Sinks are exact in bf16, to which torch rounds them; one sink takes nearly all weight of its head
    """
    make = torch.Generator().manual_seed(0)
    logits = (torch.randn(heads, generator=make) * 3).bfloat16().float()
    logits[heads // 2] = 12.0
    return Story(
        *([torch.randn(n, h, d, generator=make).to(dtype) for n in lengths] for h in (heads, kv_heads, kv_heads)),
        sinks=logits if sinks else None,
    )


@in_pairs(
    {
        "tier": HERE,
        "dtype": DTYPES,
        "heads, kv_heads, d": [
            (4, 2, 16), (6, 1, 24), (8, 8, 64), (4, 4, 96), (16, 8, 128), (4, 1, 256), (6, 2, 512), (20, 1, 7),
        ],
    },
    indirect=["tier"],
)  # fmt: skip
def test_attention_agrees_with_torch(dtype: torch.dtype, heads: int, kv_heads: int, d: int) -> None:
    some = story([150, 1, 64, 65, 200], heads, kv_heads, d, dtype)
    rows = [(0, 0, 150), (1, 0, 1), (2, 63, 64), (3, 30, 65), (4, 199, 200)]
    for window in (0, 5, 100):
        plain = some.step(*rows, window=window, plain=True)
        for ours, theirs in zip(some.step(*rows, window=window), plain, strict=True):
            close(ours, theirs)


@in_pairs(
    FUNCTIONS
    | {
        "codes": CODED,
        "heads, kv_heads, d": [
            (6, 1, 24), (8, 8, 64), (4, 4, 96), (16, 8, 128), (4, 1, 256), (6, 2, 512), (20, 1, 7),
        ],
    },
    indirect=["tier"],
)  # fmt: skip
def test_attention_to_codes_agrees_with_torch(
    dtype: torch.dtype, codes: torch.dtype, heads: int, kv_heads: int, d: int
) -> None:
    some = story([150, 1, 64, 65, 200], heads, kv_heads, d, dtype)
    rows = [(0, 0, 150), (1, 0, 1), (2, 63, 64), (3, 30, 65), (4, 199, 200)]
    for window in (0, 100):
        plain = some.step(*rows, window=window, plain=True, codes=codes)
        for ours, theirs in zip(some.step(*rows, window=window, codes=codes), plain, strict=True):
            close(ours, theirs)


@in_pairs(
    FUNCTIONS
    | {
        "codes": [None, *CODED],
        "heads, kv_heads, d": [(8, 8, 64), (16, 2, 64), (9, 1, 40), (20, 1, 7), (4, 1, 256)],
    },
    indirect=["tier"],
)
def test_attention_with_sinks_agrees_with_torch(
    dtype: torch.dtype, codes: torch.dtype | None, heads: int, kv_heads: int, d: int
) -> None:
    some = story([150, 1, 64, 65, 200], heads, kv_heads, d, dtype, sinks=True)
    rows = [(0, 0, 150), (1, 0, 1), (2, 63, 64), (3, 30, 65), (4, 199, 200)]
    for window in (0, 100):
        plain = some.step(*rows, window=window, plain=True, codes=codes)
        without = replace(some, sinks=None).step(*rows, window=window, codes=codes)
        for ours, theirs, other in zip(some.step(*rows, window=window, codes=codes), plain, without, strict=True):
            close(ours, theirs)
            assert ours.norm() < 0.97 * other.norm()


@in_pairs(
    FUNCTIONS
    | {
        "codes": [None, *CODED],
        "softcap": [0.7, 50.0],
        "heads, kv_heads, d": [(16, 2, 64), (9, 1, 40), (4, 1, 256)],
    },
    indirect=["tier"],
)
def test_attention_with_softcap_agrees_with_torch(
    dtype: torch.dtype, codes: torch.dtype | None, softcap: float, heads: int, kv_heads: int, d: int
) -> None:
    """Some scores are below the soft cap, and some far above it."""
    some = replace(story([150, 1, 200], heads, kv_heads, d, dtype, sinks=True), softcap=softcap)
    some = replace(some, q=[q * (1 if softcap < 1 else 20) for q in some.q])
    rows = [(0, 0, 150), (1, 0, 1), (2, 199, 200)]
    for window in (0, 100):
        plain = some.step(*rows, window=window, plain=True, codes=codes)
        without = replace(some, softcap=0.0).step(*rows, window=window, codes=codes)
        ours = some.step(*rows, window=window, codes=codes)
        for got, theirs in zip(ours, plain, strict=True):
            close(got, theirs)
        assert (ours[0] - without[0]).norm() > 0.1 * ours[0].norm()


@in_pairs({"tier": HERE, "dtype": DTYPES, "length": [127, 128, 129, 144, 300]}, indirect=["tier"])
def test_attention_with_sinks_at_the_ends_of_a_window(dtype: torch.dtype, length: int) -> None:
    """The first key of a window or chunk is the first key of its page, the last key, or a key in the middle."""
    some = story([length], 16, 2, 64, dtype, sinks=True)
    plain = some.step((0, 0, length), window=128, plain=True)[0]
    for begin, end in ((0, length), (length - 1, length), (length // 2 + 3, length), (7, 128), (126, 127)):
        for page in (16, 128):
            close(some.step((0, begin, min(end, length)), page=page, window=128)[0], plain[begin : min(end, length)])


@dtypes
@pytest.mark.parametrize("codes", [None, torch.int8, FOUR_BITS])
def test_attention_with_extreme_sinks(dtype: torch.dtype, codes: torch.dtype | None) -> None:
    some, rows = story([1100, 40], 4, 2, 64, dtype), [(0, 1000, 1100), (1, 39, 40)]

    def heads(*sinks: float) -> list[Tensor]:
        return replace(some, sinks=torch.tensor(sinks)).step(*rows, codes=codes)

    for got, without in zip(heads(-torch.inf, -1e38, 50.0, 3e38), some.step(*rows, codes=codes), strict=True):
        assert torch.equal(got[:, :2], without[:, :2]), "a sink without weight changes no bit"
        assert 0 < got[:, 2].float().norm() < 1e-12 * without[:, 2].float().norm()
        assert not got[:, 3].any()


@in_pairs(FUNCTIONS | {"window": [0, 1500], "sinks": [False, True]}, indirect=["tier"])
def test_attention_of_long_sequences_uses_splits(dtype: torch.dtype, window: int, sinks: bool) -> None:
    some = story([2300], 4, 2, 32, dtype, sinks)
    for rows in ((0, 2299, 2300), (0, 2200, 2300)):
        close(some.step(rows, page=64, window=window)[0], some.step(rows, page=64, window=window, plain=True)[0])


@in_pairs(
    FUNCTIONS
    | {
        "window": [0, 70],
        "heads, kv_heads, d, codes, sinks": [
            *((4, 2, 64, codes, False) for codes in (None, torch.int8, torch.float8_e4m3fn, FOUR_BITS)),
            *((9, 1, 40, codes, False) for codes in (None, torch.float8_e4m3fn)),
            (3, 1, 96, None, False),
            (16, 2, 64, None, True),
            (9, 1, 40, torch.int8, True),
            (9, 1, 40, FOUR_BITS, False),
            (6, 2, 64, FOUR_BITS, True),
            (6, 2, 64, torch.float8_e4m3fn, True),
        ],
    },
    indirect=["tier"],
)
def test_attention_bits_do_not_depend_on_chunks_pages_threads_or_batch(
    dtype: torch.dtype, window: int, heads: int, kv_heads: int, d: int, codes: torch.dtype | None, sinks: bool
) -> None:
    some = story([1200, 333, 70, 1], heads, kv_heads, d, dtype, sinks)
    some = replace(some, softcap=5.0 if codes and sinks else 0.0)
    whole = some.step((0, 0, 1200), window=window, codes=codes)[0]
    threads = torch.get_num_threads()
    try:
        for page, count in ((1, 1), (16, 2), (2048, 1)):
            torch.set_num_threads(count)

            def step(*rows: Rows, page: int = page) -> list[Tensor]:
                return some.step(*rows, page=page, window=window, codes=codes)

            company = step((1, 332, 333), (0, 1000, 1150), (2, 3, 70), (3, 0, 1))
            assert torch.equal(company[1], whole[1000:1150])
            assert torch.equal(step((0, 1199, 1200))[0], whole[1199:])
            decodes = [(s, to - 1, to) for s, to in [(1, 300), (2, 64), (3, 1), (0, 1100), (1, 20), (2, 7)] * 2]
            assert torch.equal(step(*decodes)[3], whole[1099:1100])
    finally:
        torch.set_num_threads(threads)
