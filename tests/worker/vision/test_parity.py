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
    pixels = torch.stack([normalized(each) for each in shown])[None]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids]), pixel_values=pixels).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    logits[:, PLACEHOLDER] = -torch.inf  # transformers counts placeholders wherever they are, so none is generated
    assert logits.argmax(-1).tolist() == ids
    assert (expected[range(NEW), ids] - torch.tensor(logprobs)).abs().max() < 1e-3
    others = [*shown[:-1], inverted(shown[-1])]
    assert Bench(one).answers(Asked(prompt, others, NEW))[0][0] != ids, "the answer depends on the last picture"
