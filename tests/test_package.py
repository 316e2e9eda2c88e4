"""sluice.py and setup.py: the command, `from sluice import LLM`, and the contents of a wheel."""

import os
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import setuptools

from tests.patience import PATIENCE_S
from worker.ops.native_build import EVERY_SET

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


# Stands in for gcc: makes the file behind -o, or fails if FAIL is set. The kernels are compiled elsewhere.
COMPILER = """#!/bin/sh
[ -z "$FAIL" ] || exit 1
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


def built_wheel(folder: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    """Makes a wheel from a copy of the checkout. Returns the process, and the wheels."""
    source, ignored = folder / "source", shutil.ignore_patterns("__pycache__", "*.so", ".build-*", ".objects-*")
    source.mkdir(parents=True)
    for name in ("frontend", "worker", "shared", "deploy", "bench"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("sluice.py", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (folder / "compiler").write_text(COMPILER)
    (folder / "compiler").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(folder / "made")], cwd=source,
        env=os.environ | {"CC": str(folder / "compiler")} | environment, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    return done, list((folder / "made").glob("*.whl"))


@pytest.mark.slow
def test_wheel_has_the_kernels_of_every_processor_if_asked(tmp_path: Path) -> None:
    done, (wheel,) = built_wheel(tmp_path / "with", SLUICE_WHEEL_KERNELS="1")
    assert "-py3-none-linux_" in wheel.name, done.stderr
    names = zipfile.ZipFile(wheel).namelist()
    (library,) = [name for name in names if name.endswith(".so")]
    assert library.startswith("sluice_server/worker/ops/csrc/libsluice-")
    assert set(library[:-3].rpartition("-")[2].split("+")) == set(EVERY_SET)
    assert not [name for name in names if ".build-" in name or ".objects-" in name]
    assert "sluice_server/deploy/cli/model_names.toml" in names
    assert not list((tmp_path / "with" / "source").glob("worker/**/*.so")), "the checkout stays as it is"
    failed, none = built_wheel(tmp_path / "failed", SLUICE_WHEEL_KERNELS="1", FAIL="1")
    assert failed.returncode and not none and "the C library was not compiled" in failed.stderr
    _, (plain,) = built_wheel(tmp_path / "without")
    assert plain.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(plain).namelist() if name.endswith(".so")]
