"""Answers about pictures are those of transformers, given the same pixels."""

from pathlib import Path

import pytest
import torch

from shared.messages import Picture
from tests.worker.vision.harness import (
    MODELS,
    PLACEHOLDER,
    Asked,
    Bench,
    Served,
    build,
    inverted,
    normalized,
    prompt_with,
    served,
)

NEW = 64


def inputs_of(kind: str, pictures: list[Picture], shows: torch.Tensor, patch: int) -> dict[str, torch.Tensor]:
    """What the model's processor makes of pictures. shows: which tokens of the text are theirs"""
    pixels = [normalized(each) for each in pictures]
    if kind == "gemma3":
        return {"pixel_values": torch.stack(pixels), "token_type_ids": shows.long()}
    if not kind.startswith("qwen"):
        return {"pixel_values": torch.stack(pixels)[None]}
    grids = [(1, each.height // patch, each.width // patch) for each in pictures]
    patches = []
    for each, (_, rows, columns) in zip(pixels, grids, strict=True):  # in squares of 2 x 2, each in two frames
        cut = each.reshape(3, rows // 2, 2, patch, columns // 2, 2, patch).permute(1, 4, 2, 5, 0, 3, 6)
        patches.append(cut[..., None, :, :].expand(*cut.shape[:5], 2, patch, patch).reshape(rows * columns, -1))
    return {
        "pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": shows.int(),
    }  # fmt: skip


@pytest.mark.parametrize("pictures", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_answer_has_the_log_probabilities_of_transformers(kind: str, towers: dict[str, Path], pictures: int) -> None:
    one = served(towers[kind])
    prompt, shown = prompt_with(pictures, one.vision.spec)
    [(ids, logprobs)] = Bench(one).answers(Asked(prompt, shown, NEW))
    model = build(kind)
    read = torch.tensor([prompt + ids])
    how = inputs_of(kind, shown, read == PLACEHOLDER, one.vision.spec.patch_size)
    with torch.no_grad():
        logits = model(input_ids=read, **how).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    logits[:, PLACEHOLDER] = -torch.inf  # transformers counts placeholders wherever they are, so none is generated
    assert logits.argmax(-1).tolist() == ids
    assert (expected[range(NEW), ids] - torch.tensor(logprobs)).abs().max() < 1e-3
    others = [*shown[:-1], inverted(shown[-1])]
    changed = Bench(one).answers(Asked(prompt, others, NEW))[0][1]
    assert max(abs(a - b) for a, b in zip(changed, logprobs, strict=True)) > 0.1, "the last picture matters"


def test_tokens_of_a_picture_see_each_other_in_gemma(towers: dict[str, Path]) -> None:
    one = served(towers["gemma3"])
    prompt, shown = prompt_with(1, one.vision.spec)
    [(ids, logprobs)] = Bench(one).answers(Asked(prompt, shown, NEW))
    with torch.no_grad():  # without token_type_ids, every token sees those before it alone
        causal = build("gemma3")(input_ids=torch.tensor([prompt + ids]), pixel_values=normalized(shown[0])[None])
    expected = causal.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert (expected[range(NEW), ids] - torch.tensor(logprobs)).abs().max() > 0.1


def test_first_layers_of_the_text_model_read_the_first_layers_of_the_tower_in_qwen3_vl(towers: dict[str, Path]) -> None:
    one = Served.of(towers["qwen3_vl"])
    prompt, shown = prompt_with(1, one.vision.spec)
    [(_, logprobs)] = Bench(one).answers(Asked(prompt, shown, NEW))
    for connector in one.vision._encoder.weights.deepstack:
        connector.joined_norm.zero_()
        one.vision._cache.clear()
        [(_, changed)] = Bench(one).answers(Asked(prompt, shown, NEW))
        assert max(abs(a - b) for a, b in zip(changed, logprobs, strict=True)) > 0.01
        logprobs = changed
