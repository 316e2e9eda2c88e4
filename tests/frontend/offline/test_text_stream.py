"""The progress bar of the Python API."""

import pytest

from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool
from tests.frontend.offline.harness import echoing, llm_over


@pytest.mark.parametrize("wanted", [True, False])
def test_progress_bar_is_shown_on_request(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], wanted: bool
) -> None:
    pytest.importorskip("tqdm")
    with llm_over(FakePool(play=echoing()), tokenizer) as llm:
        assert len(llm.generate(["a", "b", "c"], progress=wanted)) == 3
    assert ("3/3" in capsys.readouterr().err) is wanted
