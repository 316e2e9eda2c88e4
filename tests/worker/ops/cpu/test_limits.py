"""The bounds of arrays are stated once, in worker/ops/csrc/model_limits.h."""

import re
from pathlib import Path

import torch

from worker.ops import native as c_library
from worker.ops import native as limits
from worker.ops import paged_kv
from worker.ops.native_build import SOURCES, source_file


def test_limits_are_defined_in_one_file_and_read_from_it() -> None:
    header = source_file("model_limits.h").read_text()
    for name in ("MAX_HEAD_DIM", "MAX_KEY_ELEMENTS", "MAX_TAPS", "MAX_CHOSEN", "MAX_GROUPS"):
        others = [path for path in Path(SOURCES).rglob("*.[ch]") if re.search(rf"define {name}\b", path.read_text())]
        assert [path.name for path in others] == ["model_limits.h"]
        assert f"#define {name} {getattr(limits, name)} " in header


def test_cache_beyond_the_limits_is_not_for_the_library() -> None:
    def supports(heads: int, head_dim: int) -> bool:
        cache = torch.empty(1, 1, heads, head_dim)
        return paged_kv.supports_cache(torch.float32, cache, head_dim)

    assert supports(1, limits.MAX_HEAD_DIM) == c_library.available(torch.float32)
    assert not supports(1, limits.MAX_HEAD_DIM + 2)
    assert not supports(1 + limits.MAX_KEY_ELEMENTS // 64, 64)
