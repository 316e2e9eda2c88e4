"""Answers about images equal transformers' answers for the same pixels."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from shared.messages import PromptImage
from tests.worker.vision.harness import (
    GEMMA4S,
    MODELS,
    PIXTRALS,
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
from worker.vision.attention import in_windows

NEW = 64


def inputs_of(kind: str, images: list[PromptImage], shows: torch.Tensor, patch: int) -> dict[str, torch.Tensor]:
    """Returns the inputs that the model's processor makes of images. shows: which tokens belong to images"""
    pixels = [normalized(each) for each in images]
    if kind == "gemma3":
        return {"pixel_values": torch.stack(pixels), "token_type_ids": shows.long()}
    if kind in PIXTRALS:  # smaller images of a batch are padded
        high, wide = max(each.shape[1] for each in pixels), max(each.shape[2] for each in pixels)
        padded = [pad(each, (0, wide - each.shape[2], 0, high - each.shape[1])) for each in pixels]
        sizes = torch.tensor([each.shape[1:] for each in pixels])
        return {"pixel_values": torch.stack(padded), "image_sizes": sizes}
    patch *= 3 if kind == "gemma4_unified" else 1  # its patches are squares of 3 x 3 usual patches
    if kind in GEMMA4S:  # in a patch, colours come last; its column and row are separate inputs
        cut = [each.unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 3, 4, 0) for each in pixels]
        rows = [each.reshape(-1, 3 * patch * patch) for each in cut]
        places = [torch.cartesian_prod(*map(torch.arange, each.shape[:2])).flip(1) for each in cut]
        most = max(map(len, rows))
        return {
            "pixel_values": torch.stack([pad(each, (0, 0, 0, most - len(each))) for each in rows]),
            "image_position_ids": torch.stack([pad(each, (0, 0, 0, most - len(each)), value=-1) for each in places]),
            "mm_token_type_ids": shows.int(),
        }
    if kind == "lfm2_vl":  # images with fewer patches are padded
        cut = [each.unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 3, 4, 0) for each in pixels]
        rows = [each.reshape(-1, 3 * patch * patch) for each in cut]
        most = max(map(len, rows))
        return {
            "pixel_values": torch.stack([pad(each, (0, 0, 0, most - len(each))) for each in rows]),
            "spatial_shapes": torch.tensor([each.shape[:2] for each in cut]),
            "pixel_attention_mask": torch.tensor([[1] * len(each) + [0] * (most - len(each)) for each in rows]),
        }
    if not kind.startswith("qwen"):
        return {"pixel_values": torch.stack(pixels)[None]}
    grids = [(1, each.height // patch, each.width // patch) for each in images]
    patches = []
    # patches in squares of 2 x 2, each patch twice as two frames
    for each, (_, rows, columns) in zip(pixels, grids, strict=True):
        cut = each.reshape(3, rows // 2, 2, patch, columns // 2, 2, patch).permute(1, 4, 2, 5, 0, 3, 6)
        patches.append(cut[..., None, :, :].expand(*cut.shape[:5], 2, patch, patch).reshape(rows * columns, -1))
    return {
        "pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": shows.int(),
    }  # fmt: skip


@pytest.mark.parametrize("images", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_answer_has_the_log_probabilities_of_transformers(kind: str, towers: dict[str, Path], images: int) -> None:
    one = served(towers[kind])
    prompt, shown = prompt_with(images, one.vision.spec)
    [(ids, logprobs)] = Bench(one).answers(Asked(prompt, shown, NEW))
    model = build(kind)
    read = torch.tensor([prompt + ids])
    how = inputs_of(kind, shown, read == PLACEHOLDER, one.vision.spec.patch_size)
    if kind == "gemma4_unified":  # the masks of generation; without them, full layers also attend to later tokens
        rows = torch.zeros(1, read.shape[1], 96)
        how["attention_mask"] = model.create_masks_for_generate(
            model.config, rows, None, None, torch.arange(read.shape[1])[None], how["mm_token_type_ids"]
        )
    with torch.no_grad():
        logits = model(input_ids=read, **how).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    logits[:, PLACEHOLDER] = -torch.inf  # transformers counts all placeholders, so no placeholder may be generated
    assert logits.argmax(-1).tolist() == ids
    assert (expected[range(NEW), ids] - torch.tensor(logprobs)).abs().max() < 1e-3
    others = [*shown[:-1], inverted(shown[-1])]
    changed = Bench(one).answers(Asked(prompt, others, NEW))[0][1]
    assert max(abs(a - b) for a, b in zip(changed, logprobs, strict=True)) > 0.1, "the last image matters"


def test_experts_of_qwen3_vl_moe_are_read_as_published_and_as_saved_by_transformers(
    towers: dict[str, Path], tmp_path: Path
) -> None:
    published = Path(shutil.copytree(towers["qwen3_vl_moe"], tmp_path / "published"))
    stored = load_file(published / "model.safetensors")
    turned = {name: tensor.mT.contiguous() for name, tensor in stored.items() if ".experts." in name}
    assert len(turned) == 4, "gate and up, and down, of two layers"
    save_file({**stored, **turned}, published / "model.safetensors")
    one = served(towers["qwen3_vl_moe"])
    asked = Asked(*prompt_with(1, one.vision.spec), 8)
    assert Bench(Served.of(published)).answers(asked) == Bench(one).answers(asked)


def test_patches_see_those_of_their_window_alone_in_most_layers_of_qwen2_5_vl(towers: dict[str, Path]) -> None:
    one = Served.of(towers["qwen2_5_vl"])
    _, shown = prompt_with(2, one.vision.spec)
    vectors = [one.vision.rows(each) for each in shown]
    one.vision._encoder.spec = replace(one.vision.spec, window=0)
    one.vision._cache.clear()
    assert all(not torch.allclose(found, one.vision.rows(each)) for found, each in zip(vectors, shown, strict=True))


def test_windows_divide_an_image() -> None:
    for rows, columns, side in ((6, 4, 4), (2, 10, 4), (4, 4, 8), (8, 8, 2)):
        order, windows = in_windows(rows, columns, side)
        assert sorted(order.tolist()) == list(range(rows * columns))
        for begin, length in zip(windows.begins, windows.lengths, strict=True):
            corners = {(at // columns // side, at % columns // side) for at in order[begin : begin + length].tolist()}
            assert len(corners) == 1, "all patches of one square"
        found = [part for first in range(0, rows * columns, 5) for part in windows.parts(first, first + 5, 3)]
        assert [row for _, start, end in found for row in range(start, min(end, rows * columns))] == [
            *range(rows * columns)
        ]
        for index, start, end in found:
            assert end - start <= 3 and windows.begins[index] <= start
            assert end <= windows.begins[index] + windows.lengths[index]


def test_tokens_of_an_image_see_each_other_in_gemma(towers: dict[str, Path]) -> None:
    one = served(towers["gemma3"])
    prompt, shown = prompt_with(1, one.vision.spec)
    [(ids, logprobs)] = Bench(one).answers(Asked(prompt, shown, NEW))
    with torch.no_grad():  # without token_type_ids, attention is causal
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
