"""Tests that need Helm are skipped without it, but never where `make test FULL=1` requires it."""

from pathlib import Path

import pytest

from tests.deploy.kubernetes_programs import REQUIRED, program

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("required", [False, True])
def test_missing_program_fails_only_where_it_is_required(required: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRED, "1" if required else "")
    with pytest.raises(pytest.fail.Exception if required else pytest.skip.Exception, match="no-helm is not installed"):
        program("no-helm")


def test_program_beside_python_is_found_without_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "helm").touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert program("helm") == str(tmp_path / "helm")


def test_only_the_full_run_of_make_installs_and_requires_helm() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    (needs,) = (line for line in lines if line.startswith("test: $(VENV)"))
    always, _, only_in_full = needs.partition("$(if $(FULL),")
    assert "$(VENV)/.helm" in only_in_full and "helm" not in always
    (requires,) = (line for line in lines if REQUIRED in line)
    assert requires.startswith("test: export") and "$(if $(FULL)," in requires
