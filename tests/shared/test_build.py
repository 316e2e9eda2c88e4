"""Tests of shared/build.py."""

import subprocess
from pathlib import Path

from shared.build import commit, version


def test_version_of_a_package_that_is_not_installed_is_unknown() -> None:
    assert version("no-such-package") == "unknown"
    assert version("prometheus-client")[0].isdigit()


def test_commit_is_that_of_the_checkout_and_of_nothing_else(tmp_path: Path) -> None:
    assert commit(tmp_path) == "", "neither a checkout nor an image"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    full = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert commit(tmp_path) == full[:12]
    (tmp_path / "inner").mkdir()
    assert commit(tmp_path / "inner") == "", "a repository that the code is installed in is not its own"


def test_commit_of_an_image_is_the_one_written_when_it_was_built(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/commit.txt").write_text("0123456789ab\n")
    assert commit(tmp_path) == "0123456789ab"
