"""The folder of a translated model is made once, and again when a file changes, also by racing processes."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from frontend.text.tokenizer import Tokenizer
from shared.gguf import naming
from shared.gguf import translated as module
from shared.gguf.index import read_index
from shared.gguf.naming import GgufError
from shared.gguf.translated import translated
from tests.gguf_files import Written, write
from tests.strangers import give_away
from worker.checkpoint.checkpoint import resolve


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write("qwen3", tmp_path_factory.mktemp("gguf"))


def test_folder_is_a_checkpoint_for_a_frontend(written: Written, tmp_path: Path) -> None:
    folder = translated([written.file], tmp_path)
    tokenizer, original = Tokenizer.load(folder), Tokenizer.load(written.reference)
    texts = ["The river runs past the mill. 日本語 🙂", "<|im_start|>user\nHi<|im_end|>"]
    assert tokenizer.encode_now(texts) == original.encode_now(texts)
    assert tokenizer.templates == original.templates and tokenizer.eos_ids == (2, 0)
    assert tokenizer.named_tokens["eos_token"] == original.named_tokens["eos_token"]
    index = read_index(folder)
    assert index.files == (str(written.file),) and index.tensors["blk.0.attn_q.weight"].type == "Q8_0"


def test_folder_is_made_once_and_again_when_the_file_changes(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = translated([written.file], tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(module.subprocess, "run", lambda *a, **k: pytest.fail("translated again"))
        assert translated([written.file], tmp_path) == first
    os.utime(written.file, (1, 1))
    second = translated([written.file], tmp_path)
    assert second != first and (second / "config.json").read_bytes() == (first / "config.json").read_bytes()


def test_racing_processes_agree(written: Written, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: translated([written.file], tmp_path), range(3)))
    assert len(folders) == 1 and list(tmp_path.iterdir()) == list(folders), "no folder is left behind"


def test_cache_that_cannot_be_written_gives_a_temporary_folder(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = translated([written.file], tmp_path / "file" / "cache")
    assert folder.parent == tmp_path / "temporary" and json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("both", [False, True])
def test_cache_that_is_full_gives_a_temporary_folder_unless_that_is_full_too(
    both: bool, written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is missing stands for a full disk: the translation ends with the same exit code."""
    cache, temporary, run = tmp_path / "cache", tmp_path / "temporary", module._run
    temporary.mkdir()
    monkeypatch.setattr(module.tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(
        module, "_run", lambda files, folder, *how: run(files, folder / ("x" * (both or folder.parent == cache)), *how)
    )
    if both:
        with pytest.raises(GgufError, match=r"the translation of .*gguf cannot be written: .*x: No such file"):
            translated([written.file], cache)
    else:
        assert translated([written.file], cache).parent == temporary
    assert list(cache.iterdir()) == [] and len(list(temporary.iterdir())) == (not both), "no folder is left behind"


def test_cache_is_that_of_the_user(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert translated([written.file]).parent == tmp_path / "sluice" / "gguf"


def test_model_that_cannot_be_served_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(GgufError, match=r"bad.gguf is not a valid GGUF file") as caught:
        translated([tmp_path / "bad.gguf"], tmp_path / "cache")
    assert "\n" not in str(caught.value) and list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(GgufError, match=r"none.gguf cannot be read"):
        translated([tmp_path / "none.gguf"], tmp_path / "cache")


def test_folder_counts_as_a_translation_only_in_the_cache_or_among_own_temporary_ones(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    temporary = translated([written.file], tmp_path / "file" / "cache")
    elsewhere = tmp_path / "model"
    elsewhere.mkdir()
    assert naming.is_translation(module.gguf_cache() / "model-1") and not naming.is_translation(elsewhere)
    assert naming.is_translation(temporary) and resolve(str(temporary)) == temporary
    give_away(temporary, monkeypatch)
    assert not naming.is_translation(temporary)
