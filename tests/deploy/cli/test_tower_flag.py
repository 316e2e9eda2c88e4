"""`sluice serve` with several GGUF models in a folder, and with vision towers of other models."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.launcher.child_command import with_local_model
from frontend.text.tokenizer import Tokenizer
from shared.config.settings import Settings, with_values
from tests.gguf_towers import write_pair
from tests.images import seeing_checkpoint
from tests.patience import PATIENCE_S

KINDS = ("idefics3", "gemma3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, idefics3.gguf and gemma3.gguf, and the tower of each."""
    root = tmp_path_factory.mktemp("several")
    for kind in KINDS:
        write_pair(seeing_checkpoint(kind, root / kind), root / "files", name=kind)
    seeing_checkpoint("idefics3", root / "files" / "safetensors")
    return root / "files"


def test_each_model_of_a_folder_has_its_own_tower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    seen = {}
    for kind in KINDS:
        model = with_local_model(with_values(Settings(), {"model": str(folder / f"{kind}.gguf")})).model.model
        assert with_local_model(with_values(Settings(), {"model": model, "mmproj": "x.gguf"})).model.model == model
        found = Tokenizer.load(Path(model)).image_format
        assert found is not None
        seen[kind] = found.kind
    assert seen == {"idefics3": "tiles", "gemma3": "square"}


@pytest.mark.parametrize(
    ("model", "mmproj", "words"),
    [
        ("idefics3.gguf", "mmproj-gemma3-F32.gguf", "mmproj-gemma3-F32.gguf is a tower for gemma3, not for 'llama'"),
        ("gemma3.gguf", "idefics3.gguf", "idefics3.gguf is a file of 'llama'; a vision tower is a file of 'clip'"),
        ("gemma3.gguf", "none.gguf", "there is no such file"),
        ("safetensors", "mmproj-gemma3-F32.gguf", "is not a GGUF model"),
        ("", "mmproj-gemma3-F32.gguf", "holds several GGUF models, so name one of the files: gemma3.gguf, idefics3"),
    ],
)
def test_wrong_tower_ends_the_start_with_a_sentence_and_code_3(
    model: str, mmproj: str, words: str, folder: Path
) -> None:
    command = [sys.executable, "-m", "deploy.cli.main", "serve", "--port", "0", "--model", str(folder / model)]
    ended = subprocess.run(
        [*command, "--mmproj", str(folder / mmproj)], capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 3 and not ended.stdout
    assert words in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr
