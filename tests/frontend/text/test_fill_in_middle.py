"""Fill-in-the-middle prompts, in the layouts of the models that were trained for them."""

from pathlib import Path

import pytest

from frontend.errors import Unprocessable
from frontend.text.fill_in_middle import (
    LAYOUTS,
    PREFIX,
    SUFFIX,
    ends,
    ends_of,
    layout_of,
    repository_marks,
    with_suffix,
)
from frontend.text.tokenizer import Tokenizer
from tests.frontend.text.tokenizers import byte_level, save


def tokenizer_with(folder: Path, marks: list[str]) -> Tokenizer:
    engine = byte_level()
    engine.add_special_tokens(marks)
    return Tokenizer.load(save(engine, folder))


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_prompt_has_the_models_layout(layout: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "t", [part for part in layout if part not in (PREFIX, SUFFIX)])
    prompts = await tokenizer.encode_batch(["def f(", "x ="])
    filled = await with_suffix(prompts, "):\n", tokenizer)
    texts = {PREFIX: "def f(", SUFFIX: "):\n"}
    assert tokenizer.decode(filled[0], skip_special=False) == "<s>" + "".join(texts.get(part, part) for part in layout)
    assert filled[0][0] == filled[1][0] == prompts[0][0] and len(filled[0]) == len(prompts[0]) + 3 + len(layout) - 2
    (bare,) = await with_suffix([prompts[0][1:]], "):\n", tokenizer)
    assert bare == filled[0][1:], "ids without the beginning of a text stay without it"


async def test_model_that_was_not_trained_for_it_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for one in (tokenizer, tokenizer_with(tmp_path / "t", ["<fim_prefix>", "<fim_suffix>"])):
        with pytest.raises(Unprocessable, match="filling in the middle"):
            await with_suffix([[1, 2]], "x", one)


def test_marks_of_files_end_what_stands_between(tokenizer: Tokenizer, tmp_path: Path) -> None:
    marks = ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
    coder = tokenizer_with(tmp_path / "t", marks)
    ids = [id for mark in marks for id in coder.ids_of({mark: mark})]
    assert (repository_marks(coder), ends(coder)) == ((ids[1], ids[2]), tuple(ids))
    assert ends_of([ids], coder) == (), "there is no layout"
    assert (repository_marks(tokenizer), ends(tokenizer), layout_of(tokenizer)) == (None, (), None)


async def test_marks_are_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coder = tokenizer_with(tmp_path / "t", [*(part for part in LAYOUTS[0] if part.startswith("<")), "<|file_sep|>"])
    ids = await with_suffix([[5]], "x", coder)
    ended = ends_of(ids, coder)
    assert ended == (coder.id_of_mark("<|file_sep|>"),)
    monkeypatch.setattr(Tokenizer, "id_of_mark", None)  # so that a plain request costs no look-up
    assert (ends_of(ids, coder), ends_of([[5]], coder)) == (ended, ())
