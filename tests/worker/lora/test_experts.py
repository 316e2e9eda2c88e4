"""Adapters that change experts of a mixture: their products, and the bits of their rows in any company."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.adapters import draw_adapter
from tests.checkpoints import VOCAB, Checkpoints
from tests.worker.lora.harness import Asked, answers, decoder_of, loaded
from tests.worker.lora.test_parity import merged

PROMPTS = [[(13 * i + 7 * n) % (VOCAB - 3) + 3 for i in range(6 + 5 * n)] for n in range(6)]


# qwen2-moe has a gated shared expert; lfm2-moe has sigmoids as scores, a bias for the choice, and other tensor names;
# experts of nemotron-h-moe have no gate
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2-moe", torch.bfloat16), ("lfm2-moe", torch.float32), ("nemotron-h-moe", torch.bfloat16)],
)
def test_adapters_of_experts_in_one_batch_answer_as_each_alone(
    family: str, dtype: torch.dtype, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints(family)
    decoder = decoder_of(base, dtype)
    folders = [draw_adapter(base, tmp_path / str(n), n, experts=n < 3, r=(8, 3, 40, 8)[n]) for n in range(4)]
    adapters = [*(loaded(base, decoder, folder) for folder in folders), None, None]
    assert [bool(one.of_experts) for one in adapters if one is not None] == [True, True, True, False]
    asked = [
        Asked(prompt, adapter, 12, seed=n if n % 2 else None)
        for n, (prompt, adapter) in enumerate(zip(PROMPTS, adapters, strict=True))
    ]
    alone = [answers(decoder, [one])[0] for one in asked]
    assert answers(decoder, asked) == alone
    assert answers(decoder, asked[::-1], chunk=5, prefix_cache=False)[::-1] == alone
    assert answers(decoder, [Asked(one.prompt, None, 12, seed=one.seed) for one in asked])[:3] != alone[:3]


@pytest.mark.parametrize("family", ["qwen2-moe", "lfm2-moe", "nemotron-h-moe", "cohere2-moe"])
def test_answers_with_an_adapter_of_experts_are_those_of_merged_weights(
    family: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints(family)
    folder = draw_adapter(base, tmp_path / "a", 4, experts=True, r=6, size=0.15)
    decoder = decoder_of(base)
    whole = decoder_of(merged(base, folder, tmp_path / "merged"))
    asked = Asked(PROMPTS[3], loaded(base, decoder, folder), 30)
    assert answers(decoder, [asked]) == answers(whole, [Asked(PROMPTS[3], None, 30)])


# in gpt-oss, rows of gate and up alternate, and experts have biases
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("parameters", [("gate_up_proj", "down_proj"), ("down_proj",)])
def test_products_of_all_experts_together_are_those_of_peft(
    family: str, parameters: tuple[str, ...], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    import peft  # takes two seconds, and few tests need it

    base = checkpoints(family)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    targets = [f"mlp.experts.{name}" for name in parameters]
    changed = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets))
    draw = torch.Generator().manual_seed(1)
    for name, values in changed.named_parameters():
        if ".lora_" in name:
            values.data = torch.randn(values.shape, generator=draw) * 0.3
    changed.save_pretrained(tmp_path / "a")
    decoder = decoder_of(base)
    found, plain = (
        answers(decoder, [Asked(PROMPTS[2], adapter, 30)])[0]
        for adapter in (loaded(base, decoder, tmp_path / "a"), None)
    )
    with torch.no_grad():
        logits = changed(torch.tensor([PROMPTS[2] + found])).logits[0, len(PROMPTS[2]) - 1 : -1]
    assert logits.argmax(-1).tolist() == found and found != plain
