"""A text model and its tower in GGUF files give the same bits as the same checkpoint in safetensors."""

import json
from pathlib import Path

import pytest
import torch

from frontend.text.tokenizer import Tokenizer
from shared.gguf.index import read_index
from shared.gguf.naming import GgufError
from shared.gguf.translated import TowerFile, translated
from tests.gguf_towers import all_experts, rounded, write_pair
from tests.images import LFM2_SETTINGS, seeing_checkpoint
from tests.worker.vision.harness import CPU, Asked, Bench, Served, build, prompt_with, save
from worker.checkpoint.checkpoint import CheckpointError, read_config, resolve
from worker.models.config import spec_from_config
from worker.vision.weights import tower_of

NEW = 12
CUTS = (*LFM2_SETTINGS, "size")
SEEING = ("idefics3", "gemma3", "lfm2_vl", "llava", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("seeing")
    found = {kind: rounded(seeing_checkpoint(kind, root / kind)) for kind in SEEING}
    file = found["lfm2_vl"] / "preprocessor_config.json"  # GGUF files do not state how LFM2-VL cuts images
    file.write_text(json.dumps({name: one for name, one in json.loads(file.read_text()).items() if name not in CUTS}))
    return found


def answers(folder: Path) -> list[tuple[list[int], list[float]]]:
    one = Served.of(folder)
    spec, placeholder = one.vision.spec, one.vision.spec.placeholder
    found = []
    for images in (1, 2):
        prompt, shown = prompt_with(images, spec, seed=images)
        for each in shown:
            prompt[each.start : each.start + each.tokens] = [placeholder] * each.tokens
        found += Bench(one).answers(Asked(prompt, shown, NEW))
    return found


@pytest.mark.parametrize("kind", SEEING)
def test_two_files_have_the_bits_and_the_format_of_the_checkpoint(
    kind: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    text, tower = write_pair(
        checkpoints[kind], tmp_path / "files", apart=kind == "qwen2_5_vl", swapped=kind == "gemma3"
    )
    folder = resolve(str(text))
    assert read_index(folder).files == (str(text), str(tower)), "the tower beside the model is found"
    expected, found = Tokenizer.load(checkpoints[kind]), Tokenizer.load(folder)
    assert found.image_format is not None and found.image_format == expected.image_format
    assert answers(folder) == answers(checkpoints[kind])


def test_every_layer_with_experts(tmp_path: Path) -> None:
    checkpoint = save("qwen3_vl_moe", tmp_path / "moe")
    all_experts("qwen3_vl_moe", build("qwen3_vl_moe")).save_pretrained(checkpoint)
    (checkpoint / "chat_template.jinja").write_text("<|image_pad|>")
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": 7, "content": "<|image_pad|>", "special": True})
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    text, _ = write_pair(checkpoint, tmp_path / "files")
    folder = resolve(str(text))
    assert read_config(folder)["model_type"] == "qwen3_vl_moe"
    assert answers(folder) == answers(checkpoint)


def test_a_tower_in_blocks_becomes_the_numbers_that_they_mean(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    whole, few = (
        Served.of(resolve(str(write_pair(checkpoints["qwen3_vl"], tmp_path / types, types=types)[0])))
        for types in ("F32", "Q8_0")
    )
    (_, [image]) = prompt_with(1, whole.vision.spec)
    exact, near = whole.vision.rows(image), few.vision.rows(image)
    assert not torch.equal(exact, near) and (exact - near).abs().max() < 0.05 * exact.abs().max()


def test_a_projector_that_is_not_served_leaves_the_text(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    changes = {"clip.projector_type": "minicpmv"}
    text, tower = write_pair(checkpoints["idefics3"], tmp_path / "files", changes=changes)
    for given in (True, False):
        folder = translated([text], tower=TowerFile(tower, given))
        assert Tokenizer.load(folder).image_format is None
        spec = spec_from_config(read_config(folder))
        found = tower_of(folder, spec.hidden_size, torch.float32, CPU)
        assert (
            found.weights is None and "the projector 'minicpmv' of mmproj-model-F32.gguf is not served" in found.missing
        )
    assert resolve(str(text), mmproj="off") != folder
    assert "vision_config" not in read_config(resolve(str(text), mmproj="off"))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"clip.vision.projection_dim": 96}, "makes vectors of 96 numbers; the text model model.gguf has 64"),
        ({"clip.projector_type": "gemma3"}, "is a tower for gemma3, not for 'llama'"),
        ({"clip.vision.patch_size": 0}, "without patches or layers"),
        ({"clip.vision.projector.scale_factor": 0}, "scale_factor is 0; supported are 1 and more"),
        ({"clip.vision.block_count": None}, "has no clip.vision.block_count"),
    ],
)
def test_a_tower_that_does_not_fit_is_refused_if_it_is_named(
    changes: dict[str, object], words: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    text, tower = write_pair(checkpoints["idefics3"], tmp_path / "files", changes=changes)
    with pytest.raises(CheckpointError, match=words):
        resolve(str(text), mmproj=str(tower))
    found = read_config(resolve(str(text)))
    assert found["model_type"] == "llama" and words in found["vision_config"]["not_served"]


def test_files_that_are_no_tower(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    text, _ = write_pair(checkpoints["idefics3"], tmp_path / "files")
    with pytest.raises(CheckpointError, match=r"model\.gguf is a file of 'llama'; a vision tower is a file of 'clip'"):
        resolve(str(text), mmproj=str(text))
    with pytest.raises(CheckpointError, match=r"--mmproj .*none\.gguf: there is no such file"):
        resolve(str(text), mmproj=str(tmp_path / "none.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(GgufError, match=r"broken\.gguf is not a complete GGUF file"):
        translated([text], tower=TowerFile(tmp_path / "broken.gguf", given=True))
