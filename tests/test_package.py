"""sluice.py and setup.py: the command, `from sluice import LLM`, and the contents of a wheel."""

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]


def python(code: str, cwd: Path, argv0: str = "-c") -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(1, {str(ROOT)!r}); sys.argv[0] = {argv0!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S)


def test_import_finds_its_packages_beside_others_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "shared.py").touch()
    done = python("from sluice import LLM; print(LLM.__name__, sys.path[0] == '')", tmp_path)
    assert done.stdout == "LLM True\n", done.stderr


def test_import_after_another_package_of_a_name_says_which(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/__init__.py").touch()
    done = python("import shared\nimport sluice", tmp_path)
    assert done.stderr.splitlines()[-1].startswith("ImportError: sluice needs the package name 'shared', which this ")


def test_interrupt_of_the_command_before_it_runs_is_silent(tmp_path: Path) -> None:
    usual = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs ignore SIGINT
    raise_it = f"{usual}\nimport sluice, time; signal.raise_signal(signal.SIGINT); time.sleep(60)"
    done = python(raise_it, tmp_path, "/usr/bin/sluice")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert "KeyboardInterrupt" in python(raise_it, tmp_path, "program.py").stderr, "a program keeps its own handling"


def test_wheel_has_every_package_in_one_folder_and_every_file_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, object] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: found.update(options))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    packages, folders = found["packages"], found["package_dir"]
    assert isinstance(packages, list) and isinstance(folders, dict)
    assert all(name.startswith("sluice_server.") for name in packages)
    assert not [name for name in packages if ".tests" in name]
    places = {name.removeprefix("sluice_server.").replace(".", "/") for name in packages}
    for folder in folders.values():
        files = [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
        assert files and {path.parent.relative_to(ROOT).as_posix() for path in files} <= places
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert set(data) <= set(packages)
    assert "deploy/demo" in places
    taken = {
        path
        for name, patterns in data.items()
        for pattern in patterns
        for path in (ROOT / name.removeprefix("sluice_server.").replace(".", "/")).glob(pattern)
    }
    needed = [*ROOT.glob("frontend/web/**/*"), *ROOT.glob("worker/**/*.[ch]"), *ROOT.glob("deploy/demo/model/*")]
    assert {path for path in needed if path.is_file()} <= taken
