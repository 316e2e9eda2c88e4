"""Reading GGUF adapters, and refusals. The tests write the file byte by byte."""

import struct
from typing import Any

import pytest

from shared.gguf import lora as gguf
from shared.gguf.lora import GgufAdapter, read_gguf
from shared.lora import AdapterError, AdapterFiles

A, B = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"
FIELDS = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
TENSORS = {A: ((4, 10), 0), B: ((6, 4), 0)}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(value: Any) -> bytes:
    match value:
        case str():
            return struct.pack("<I", 8) + text(value)
        case float():
            return struct.pack("<If", 6, value)
        case int():
            return struct.pack("<II", 4, value)
    return bytes(value)


def made(fields: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, version: int = 3) -> bytes:
    given, entries = FIELDS | (fields or {}), TENSORS | (tensors or {})
    header = b"GGUF" + struct.pack("<IQQ", version, len(entries), len(given))
    header += b"".join(text(key) + field(value) for key, value in given.items())
    offset = 0
    for name, (shape, kind) in entries.items():
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)
        offset += 256
    return header + bytes(-len(header) % (given.get("general.alignment") or 32)) + bytes(offset)


def read(content: bytes, max_rank: int = 0) -> GgufAdapter:
    return read_gguf(AdapterFiles(None, content), max_rank)


@pytest.mark.parametrize("more", [{}, {"general.alignment": 64}, {"x": struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3)}])
def test_products_have_the_shapes_and_places_of_their_tensors(more: dict[str, Any]) -> None:
    content = made(more)
    found = read(content)
    low = found.products["blk.0.attn_q"]
    assert (found.architecture, low.a.shape, low.b.shape, low.rank) == ("llama", (4, 10), (6, 4), 4)
    assert (low.a.begin, low.a.end - low.a.begin) == (len(content) - 512, 160)
    assert (low.b.begin, low.b.end - low.b.begin) == (len(content) - 256, 96)


def test_scale_is_alpha_by_rank_or_one() -> None:
    assert [read(made({"adapter.lora.alpha": alpha})).products["blk.0.attn_q"].scale for alpha in (8.0, 2.0, 0.0)] == [
        2.0, 0.5, 1.0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "tensors", "words"),
    [
        ({"general.type": "model"}, {}, "general.type 'model'"),
        ({"adapter.type": "control"}, {}, "adapter.type 'control'"),
        ({"adapter.alora.invocation_tokens": 3}, {}, "activated LoRA"),
        ({"general.architecture": 3}, {}, "no general.architecture"),
        ({"adapter.lora.alpha": -1.0}, {}, "alpha -1"),
        ({"adapter.lora.alpha": float("nan")}, {}, "alpha nan"),
        ({"adapter.lora.alpha": "x"}, {}, "alpha x"),
        ({"general.alignment": 0}, {}, "alignment"),
        ({"x": struct.pack("<I", 99)}, {}, "type 99"),
        ({"x": struct.pack("<IIQ", 9, 9, 1)}, {}, "type 9,"),
        ({"x": struct.pack("<IIQ", 9, 8, 1 << 60)}, {}, "not complete"),
        ({"x": struct.pack("<IIQ", 9, 4, 1 << 60)}, {}, "not complete"),
        ({}, {"blk.0.attn_norm.weight": ((4,), 0)}, "attn_norm.weight"),
        ({}, {"blk.0.attn_k.weight.lora_a": ((4, 10), 0)}, "only one of lora_a and lora_b of blk.0.attn_k"),
        ({}, {A: ((5, 10), 0)}, "ranks differ"),
        ({}, {A: ((4, 10), 2)}, "type 2; supported are F32, F16, Q8_0, BF16"),
        ({}, {A: ((4, 10), 8)}, r"shape \[4, 10\]"),
        ({}, {A: ((2, 4, 10), 0)}, r"shape \[2, 4, 10\]"),
        ({}, {A: ((0, 10), 0)}, r"shape \[0, 10\]"),
        ({}, {A: ((1, 1, 1, 4, 10), 0)}, "5 dimensions"),
        ({}, {A: ((4, 1 << 50), 0)}, "not complete"),
        ({}, {A: ((4, 20), 0)}, "the tensors .*lora_a and .*lora_b, which overlap"),
        ({}, {"x" * (gguf.MAX_NAME_BYTES + 1): ((4, 4), 0)}, "too long"),
    ],
)  # fmt: skip
def test_what_is_no_lora_is_refused_by_name(fields: dict[str, Any], tensors: dict[str, Any], words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        read(made(fields, tensors))


def test_ranks_and_counts_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(made(), 4)
    with pytest.raises(AdapterError, match="attn_q has the rank 4, above --max-lora-rank 3"):
        read(made(), 3)
    for bound, most in (("MAX_FIELDS", len(FIELDS)), ("MAX_TENSORS", len(TENSORS))):
        monkeypatch.setattr(gguf, bound, most)
        assert read(made())
        monkeypatch.setattr(gguf, bound, most - 1)
        with pytest.raises(AdapterError, match=f"more than .*{most - 1}"):
            read(made())
        monkeypatch.undo()


@pytest.mark.parametrize("kind, count", [(0, 1 << 63), (10, (1 << 64) - 1), (8, 1 << 63)])
def test_array_that_ends_beyond_any_file_is_refused(kind: int, count: int) -> None:
    with pytest.raises(AdapterError, match="not complete"):
        read(made({"x": struct.pack("<IIQ", 9, kind, count)}))


def test_every_cut_is_refused() -> None:
    whole = made()
    for end in range(len(whole) - 256 + 96):
        with pytest.raises(AdapterError):
            read(whole[:end])
    for version in (1, 4, 3 << 24):
        with pytest.raises(AdapterError, match="version 2 or 3"):
            read(made(version=version))
    assert read(made(version=2))
