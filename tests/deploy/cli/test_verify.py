"""`sluice verify` without a server. tests/e2e/test_receipts.py tests it with a server."""

import json
from pathlib import Path

import pytest

from tests.deploy.cli.harness import sluice


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON"), ("[]", "must hold a JSON object")])
def test_unusable_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str) -> None:
    (tmp_path / "file").write_text(content)
    code, _, err = sluice(capsys, "verify", str(tmp_path / "file"), "--request", str(tmp_path / "file"))
    assert code == 2 and f"{tmp_path / 'file'} {words}" in err


def test_missing_file_and_silent_server_could_not_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = sluice(capsys, "verify", str(tmp_path / "none"), "--request", "x")
    assert code == 2 and "cannot be read" in err
    (tmp_path / "file").write_text(json.dumps({"output_ids": [1], "index": 0}))
    words = ("verify", str(tmp_path / "file"), "--request", str(tmp_path / "file"), "--url", "http://127.0.0.1:1")
    code, _, err = sluice(capsys, *words)
    assert code == 2 and "no answer from http://127.0.0.1:1" in err
