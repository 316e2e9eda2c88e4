"""Reading the files of a PEFT adapter."""

import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import save

from shared import lora as patterns
from shared.lora import AdapterError, AdapterFiles, LowRank, low_rank_modules

Q, DOWN = "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.down_proj"


def made(tensors: dict[str, Any] | None = None, weights: bytes | None = None, **config: Any) -> AdapterFiles:
    drawn = {f"{Q}.lora_A": (4, 10), f"{Q}.lora_B": (6, 4), f"{DOWN}.lora_A": (2, 9), f"{DOWN}.lora_B": (5, 2)}
    named = {f"base_model.model.{name}.weight": torch.ones(shape) for name, shape in drawn.items()}
    facts = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "rank_pattern": {"down_proj": 2}, **config}
    return AdapterFiles(json.dumps(facts).encode(), save(named | (tensors or {})) if weights is None else weights)


def scales(**config: Any) -> list[float]:
    found = low_rank_modules(made(**config))
    return [found[name].scale for name in (Q, DOWN)]


def test_modules_have_the_shapes_and_bytes_of_their_tensors() -> None:
    files = made()
    found = low_rank_modules(files)
    assert found.keys() == {Q, DOWN} and isinstance(found[Q], LowRank)
    assert (found[Q].a.shape, found[Q].b.shape, found[DOWN].rank) == ((4, 10), (6, 4), 2)
    ones = torch.frombuffer(bytearray(files.weights[found[Q].a.begin : found[Q].a.end]), dtype=torch.float32)
    assert torch.equal(ones, torch.ones(40))


def test_scales_follow_alpha_rank_and_their_patterns() -> None:
    assert scales() == [4.0, 8.0]
    assert scales(use_rslora=True) == [8.0, 16 / math.sqrt(2)]
    assert scales(alpha_pattern={"layers.3.mlp.down_proj": 3}) == [4.0, 1.5]
    assert scales(alpha_pattern={r".*\.3\..*q_proj": 2, "q_proj": 9}) == [0.5, 8.0], "the first that matches counts"
    assert scales(alpha_pattern={"proj": 5}) == [4.0, 8.0], "a pattern begins at a name's part"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"), ({"peft_type": "IA3"}, "IA3"), ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": ["x.weight"]}, "target_parameters.*experts"), ({"r": 0}, "r must be"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"r": 8}, "gives it the rank 8"), ({"rank_pattern": {}}, "the rank 4"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern.*regular"), ({"rank_pattern": {"a{9999999999}": 2}}, "regular"),
        ({"alpha_pattern": {"(" * 9999: 2}}, "alpha_pattern"), ({"alpha_pattern": {"\ud800|a": 2}}, "alpha_pattern"),
        ({"alpha_pattern": [1]}, "alpha_pattern"), ({"r": float("inf")}, "r must be"),
        ({"use_rslora": "false"}, "use_rslora must be true or false, not false"),
    ],
)  # fmt: skip
def test_other_formulas_and_malformed_values_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        low_rank_modules(made(**config))


def test_pattern_that_would_be_matched_for_years_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.3)
    with pytest.raises(AdapterError, match=r"rank_pattern cannot be matched: it takes longer than 0\.3 s"):
        low_rank_modules(made(rank_pattern={r"((\w|\.)*)*!": 2}))


def test_ranks_above_the_limit_and_other_tensors_are_refused_by_name() -> None:
    assert low_rank_modules(made(), 4)
    with pytest.raises(AdapterError, match=r"q_proj has the rank 4, above --max-lora-rank 3"):
        low_rank_modules(made(), 3)
    for name, shape in (("x.lora_embedding_A", (2, 2)), ("lm_head.weight", (2, 2))):
        with pytest.raises(AdapterError, match=name):
            low_rank_modules(made({name: torch.ones(shape)}))
    with pytest.raises(AdapterError, match=r"only one of lora_A and lora_B of y"):
        low_rank_modules(made({"base_model.model.y.lora_A.weight": torch.ones(4, 2)}))
    with pytest.raises(AdapterError, match="F64"):
        low_rank_modules(made({"y.lora_A.weight": torch.ones(4, 2).double()}))
    with pytest.raises(AdapterError, match="shape"):
        low_rank_modules(made({"y.lora_A.weight": torch.ones(4)}))
    with pytest.raises(AdapterError, match=r"has the tensor 'x{100}…', which is not"):
        low_rank_modules(made({"x" * 999: torch.ones(2, 2)}))


@pytest.mark.parametrize("spelled", [f"{Q}.lora_A.weight", f"base_model.model.{Q}.lora_A.default.weight"])
def test_two_tensors_for_one_matrix_are_refused(spelled: str) -> None:
    """One of them was left out, whichever came first in the file."""
    with pytest.raises(AdapterError, match=r"has two tensors for lora_A of model\.layers\.3\.self_attn\.q_proj"):
        low_rank_modules(made({spelled: torch.zeros(4, 10)}))


def test_broken_files_are_refused() -> None:
    whole = made().weights
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])

    def with_header(**more: Any) -> bytes:
        text = json.dumps(header | more).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + size :]

    entry = {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}
    assert low_rank_modules(made(weights=with_header()))
    broken = [
        b"", whole[:7], whole[:50], whole[:-1], b"\xff" * 40, with_header(x=3), with_header(x={}),
        with_header(x=entry | {"data_offsets": [0, 31]}), with_header(x=entry | {"data_offsets": [-32, 0]}),
        with_header(x=entry | {"shape": [1 << 40, 1 << 40]}), with_header(x=entry | {"shape": "ab"}),
    ]  # fmt: skip
    name, stored = next(iter(header.items()))
    broken.append(with_header(**{name: stored | {"data_offsets": [float(place) for place in stored["data_offsets"]]}}))
    for content in broken:
        with pytest.raises(AdapterError):
            low_rank_modules(made(weights=content))
    with pytest.raises(AdapterError, match=r"has the tensors .* and .*, which overlap"):
        low_rank_modules(made(weights=with_header(**{"y.lora_A.weight": entry})))
    for config in (b"", b"[]", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(AdapterError, match="adapter_config"):
            low_rank_modules(AdapterFiles(config, whole))
