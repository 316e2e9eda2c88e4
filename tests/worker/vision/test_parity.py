"""Answers about pictures are those of transformers, given the same pixels."""

from pathlib import Path

import pytest
import torch

from tests.worker.vision.harness import (
    MODELS,
    PLACEHOLDER,
    Asked,
    Bench,
    build,
    inverted,
    normalized,
    prompt_with,
    served,
)

NEW = 64


@pytest.mark.parametrize("pictures", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_answer_has_the_log_probabilities_of_transformers(kind: str, towers: dict[str, Path], pictures: int) -> None:
    one = served(towers[kind])
    prompt, shown = prompt_with(pictures, one.vision.spec)
    [(ids, logprobs)] = Bench(one).answers(Asked(prompt, shown, NEW))
    model = build(kind)
    pixels, read = torch.stack([normalized(each) for each in shown]), torch.tensor([prompt + ids])
    how = {"pixel_values": pixels[None]}
    if kind == "gemma3":
        how = {"pixel_values": pixels, "token_type_ids": (read == PLACEHOLDER).long()}
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
