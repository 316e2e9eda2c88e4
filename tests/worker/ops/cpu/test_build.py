"""What is compiled for a processor and in which order, where a worker looks for the C library, and what it does without
one.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.strangers import give_away
from worker.ops import native_build
from worker.ops.native_build import OF_X86

Made = list[Path]
Compiler = Callable[[str], str]  # makes a compiler from the lines of a shell script, and returns its path

ZEN3, SAPPHIRE_RAPIDS = ("avx2",), ("avx512", "avx512bf16", "amx")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Records compilations, with the test's own sources and cache."""
    seen: Made = []

    def compiled(
        compiler: str, room: Path, units: native_build.Units, on_progress: native_build.Progress, kept: Path | None
    ) -> Path:
        seen.append(room)
        (room / "library.so").touch()
        return room / "library.so"

    (tmp_path / "sources").mkdir()
    monkeypatch.setattr(native_build, "LIBRARIES", tmp_path / "sources")
    monkeypatch.setattr(native_build, "FOLDERS", (*native_build.FOLDERS, str(tmp_path / "sources")))
    monkeypatch.setattr(native_build, "_compile", compiled)
    monkeypatch.setattr(native_build, "machine", lambda: "x86_64")
    monkeypatch.setenv("CC", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return seen


@pytest.fixture
def x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "TIERS", OF_X86)
    monkeypatch.setattr(native_build, "UNITS", native_build.X86_UNITS)


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    """Makes compilers: they append their arguments to the file `calls`, and make an empty output file."""

    def make(last: str) -> str:
        path = tmp_path / "compiler"
        path.write_text(f"""#!/bin/sh
echo "$@" >>{tmp_path}/calls
for word; do [ "$before" = -o ] && : >"$word"; before=$word; done
{last}
""")
        path.chmod(0o755)
        return str(path)

    return make


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != native_build.LIBRARIES)


def test_installed_library_is_used_in_a_read_only_package(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = native_build.build()
    assert beside is not None and beside.parent == tmp_path / "sources" and len(made) == 1
    read_only(monkeypatch)
    assert native_build.build() == beside and len(made) == 1


def test_build_in_a_read_only_package_uses_the_cache(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only(monkeypatch)
    cached = native_build.build()
    assert cached is not None and cached.parent == tmp_path / "cache" / "sluice"
    assert native_build.build() == cached and len(made) == 1


def test_processes_that_start_together_compile_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = native_build._compile

    def slowly(
        compiler: str, room: Path, units: native_build.Units, on_progress: native_build.Progress, kept: Path | None
    ) -> Path:
        deadline = time.monotonic() + PATIENCE_S
        while len(told) < 4:  # the other three learn the progress of the one that compiles
            on_progress(7, 23)
            time.sleep(0.01)
            assert time.monotonic() < deadline, told
        return compiled(compiler, room, units, on_progress, kept)

    told: set[int] = set()

    def tell(done: int, total: int) -> None:
        if (done, total) == (7, 23):
            told.add(threading.get_ident())

    monkeypatch.setattr(native_build, "_compile", slowly)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: native_build.build(on_progress=tell), range(4))]
    assert len(made) == 1 and found == [native_build.LIBRARIES / native_build._file_name(native_build.EVERY_SET)] * 4


def test_library_of_one_processor_is_not_taken_on_another(made: Made, x86: None) -> None:
    old, new = native_build.build(ZEN3), native_build.build(SAPPHIRE_RAPIDS)
    assert old is not None and new is not None and old != new and len(made) == 2
    assert old.name.endswith("-avx2.so") and new.name.endswith("-avx512+avx512bf16+amx.so")
    assert native_build.existing(ZEN3) == old and native_build.existing(SAPPHIRE_RAPIDS) == new
    assert native_build.existing(("avx2", "avxvnni")) is None


def test_library_with_more_instruction_sets_than_a_processor_uses_is_taken(made: Made, x86: None) -> None:
    everything = native_build.build(OF_X86[1:])
    assert (
        native_build.build(ZEN3) == native_build.build(SAPPHIRE_RAPIDS) == native_build.build(()) == everything
        and len(made) == 1
    )


def test_library_of_other_sources_is_removed_but_not_those_of_other_processors(made: Made, x86: None) -> None:
    older = native_build.LIBRARIES / "libsluice-0123456789abcdef-avx2.so"
    older.touch()
    assert native_build.build(ZEN3) and native_build.build(SAPPHIRE_RAPIDS)
    assert not older.exists() and native_build.existing(ZEN3)


def test_folders_of_killed_compilations_are_removed(made: Made) -> None:
    left = native_build.LIBRARIES / ".build-killed"
    left.mkdir()
    (left / "0.o").touch()
    assert native_build.build() and not left.exists()


@pytest.mark.parametrize("sets", [(), ZEN3, ("avx2", "avxvnni"), ("avx512",), SAPPHIRE_RAPIDS, OF_X86[1:]])
def test_units_are_those_of_the_instruction_sets(sets: tuple[str, ...], x86: None) -> None:
    chosen = native_build.units_of(sets)
    assert {native_build.SETS[flags] for _, flags in chosen if flags in native_build.SETS} == set(sets)
    assert {source for source, flags in chosen if flags not in native_build.SETS} == {
        *native_build.ANY,
        "unpack_blocks.c",
        "embedding.c",
    }
    assert [unit for unit in native_build.X86_UNITS if unit in chosen] == [
        *chosen
    ]  # in the order in which all are linked


def test_every_unit_belongs_to_an_instruction_set_or_to_every_library() -> None:
    for units in (native_build.X86_UNITS, native_build.ARM_UNITS):
        assert {flags for _, flags in units} - native_build.SETS.keys() == {(), native_build.ROUND_TWICE}
    assert native_build.SECONDS.keys() <= {source for source, _ in native_build.X86_UNITS}


def test_longest_units_are_compiled_first_and_all_are_linked_in_order(
    compiler: Compiler, tmp_path: Path, x86: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    told: list[tuple[int, int]] = []
    units = native_build.units_of(ZEN3)
    native_build._compile(compiler(""), tmp_path, units, lambda *progress: told.append(progress))
    *compiled, linked = calls(tmp_path)
    sources = [line.partition(" -c ")[2].split()[0].rpartition("/")[2] for line in compiled]
    seconds = [native_build.SECONDS.get(source, 0.0) for source in sources]
    assert sorted(sources) == sorted(source for source, _ in units)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    assert linked.split()[2:-3] == [f"{tmp_path}/{i}.o" for i in range(len(units))]
    assert told == sorted(told) and told[-1] == (len(units), len(units))


@pytest.fixture
def sources(tmp_path: Path, x86: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A writable folder of sources, without any."""
    (tmp_path / "sources").mkdir()
    monkeypatch.setattr(native_build, "LIBRARIES", tmp_path / "sources")
    monkeypatch.setattr(native_build, "FOLDERS", (*native_build.FOLDERS, str(tmp_path / "sources")))
    monkeypatch.setattr(native_build, "machine", lambda: "x86_64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return native_build.LIBRARIES


def compiled_units(tmp_path: Path) -> list[tuple[str, str]]:
    """Returns the sources and flags of the compiler's calls, and forgets the calls. The last call must have linked."""
    *compiled, linked = calls(tmp_path)
    (tmp_path / "calls").unlink()
    assert " -shared " in f" {linked} "
    return [(line.partition(" -c ")[2].split()[0], line.partition(" -iquote")[0]) for line in compiled]


def test_library_with_more_sets_compiles_only_the_units_that_another_library_has_not(
    compiler: Compiler, tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make test` after `make run` compiles the kernels of the lower instruction sets only."""
    monkeypatch.setenv("CC", compiler(""))
    assert native_build.build(SAPPHIRE_RAPIDS) and len(compiled_units(tmp_path)) == len(
        native_build.units_of(SAPPHIRE_RAPIDS)
    )
    both = ("avx2", *SAPPHIRE_RAPIDS)
    assert native_build.build(both)
    only = [flags for _, flags in compiled_units(tmp_path)]
    assert len(only) == len(native_build.units_of(both)) - len(native_build.units_of(SAPPHIRE_RAPIDS))
    assert all("-mavx2" in flags for flags in only)
    (sources / native_build._file_name(both)).unlink()
    assert native_build.build(ZEN3) and compiled_units(tmp_path) == [], "all objects are there"
    assert native_build.build(ZEN3, force=True) and len(compiled_units(tmp_path)) == len(native_build.units_of(ZEN3))
    assert native_build.build(native_build.EVERY_SET)
    assert not [*sources.glob(".objects-*")], "no other library is left to compile"


def test_objects_of_other_sources_flags_and_compilers_are_not_taken(
    compiler: Compiler, tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(native_build.units_of(ZEN3))
    monkeypatch.setenv("CC", compiler(""))
    assert native_build.build(ZEN3) and len(compiled_units(tmp_path)) == count
    (sources / "new.h").write_text("int changed;")
    assert native_build.build(ZEN3) and len(compiled_units(tmp_path)) == count
    assert len([*sources.glob(".objects-*")]) == len([*sources.glob("*.so")]) == 1
    with monkeypatch.context() as patch:
        patch.setattr(native_build, "COMMON", (*native_build.COMMON, "-g"))
        assert native_build.build(ZEN3) and len(compiled_units(tmp_path)) == count
    other = Path(compiler("")).rename(tmp_path / "other")
    monkeypatch.setenv("CC", str(other))
    next(sources.glob("*.so")).unlink()
    assert native_build.build(ZEN3) and len(compiled_units(tmp_path)) == count


def test_no_object_is_kept_of_a_unit_that_fails_or_in_the_users_cache(
    compiler: Compiler, tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler('case "$*" in *norm.c*) exit 1;; esac'))
    assert native_build.build(ZEN3) is None
    (tmp_path / "calls").unlink()
    monkeypatch.setenv("CC", compiler(""))
    assert native_build.build(ZEN3) and any(source.endswith("norm.c") for source, _ in compiled_units(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: path != sources)
    assert native_build.build(SAPPHIRE_RAPIDS) and not [*(tmp_path / "cache").rglob("*.o")]


def test_compiling_needs_no_packages() -> None:
    """`make run` compiles while pip installs them."""
    root = str(Path(__file__).parents[4])
    code = f"import sys; sys.path.insert(0, {root!r}); import worker.ops.native_build"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=PATIENCE_S)


def test_failing_unit_ends_the_compilation_with_its_message(compiler: Compiler, tmp_path: Path, x86: None) -> None:
    failing = compiler('case "$*" in *norm.c*) echo "error: no such header" >&2; exit 1;; esac')
    with pytest.raises(subprocess.CalledProcessError) as raised:
        native_build._compile(failing, tmp_path, native_build.units_of(ZEN3))
    assert raised.value.stderr == "error: no such header\n"


def test_process_that_ends_ends_its_compiler(
    compiler: Compiler, tmp_path: Path, x86: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "LIBRARIES", tmp_path)
    monkeypatch.setattr(native_build, "machine", lambda: "x86_64")
    monkeypatch.setenv("CC", compiler("exec sleep 600"))
    building = native_build.Building(ZEN3)
    deadline = time.monotonic() + PATIENCE_S
    while building.progress == (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    building._stop()  # as at the end of the interpreter
    with pytest.raises(native_build.Stopped):
        building.result()
    assert not [*tmp_path.glob(".build-*/")] and native_build.existing(ZEN3) is None


def test_whoever_waits_for_the_library_logs_its_progress(
    made: Made, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged, waited = threading.Event(), threading.Event()

    def slowly(sets: object, on_progress: native_build.Progress) -> Path:
        on_progress(7, 23)
        assert logged.wait(PATIENCE_S) and waited.wait(PATIENCE_S)
        return Path("library.so")

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "Building the CPU kernels: 7 of 23":
                logged.set()

    monkeypatch.setattr(native_build, "_found_or_compiled", slowly)
    monkeypatch.setattr(native_build, "REPORT_S", 0.01)
    seen = Seen()
    native_build.log.addHandler(seen)
    try:
        with caplog.at_level(logging.INFO, "sluice.kernels"):
            assert native_build.Building(()).result(waited.set) == Path("library.so")
    finally:
        native_build.log.removeHandler(seen)


def test_build_without_a_writable_folder_returns_none(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_only(monkeypatch)
    (tmp_path / "cache").touch()
    assert native_build.build() is None and not made
    assert "plain PyTorch" in capsys.readouterr().err


def test_build_without_a_home_uses_a_private_folder_among_temporary_files(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    read_only(monkeypatch)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = native_build.build()
    assert library is not None and library.parent == tmp_path / f"sluice-{os.geteuid()}"
    assert library.parent.stat().st_mode & 0o777 == 0o700


def test_library_in_another_users_cache_is_not_used(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_only(monkeypatch)
    cached = native_build.build()
    assert cached is not None
    give_away(cached.parent, monkeypatch)
    assert native_build.build() is None
    assert "other users can write to it" in capsys.readouterr().err


def test_library_of_another_user_is_compiled_again(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only(monkeypatch)
    cached = native_build.build()
    assert cached is not None and len(made) == 1
    monkeypatch.setattr(native_build, "is_trusted", lambda path: path != cached)
    assert native_build.build() == cached and len(made) == 2


def test_reason_of_a_failure_is_told_once_to_those_who_need_the_library(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    building = native_build.Building(native_build.EVERY_SET)
    building._thread.join(PATIENCE_S)
    assert capsys.readouterr().err == ""  # a launcher only begins
    assert building.result() is building.result() is None
    told = capsys.readouterr().err
    assert told.count("no C compiler was found") == told.count("\n") == 1


def test_progress_is_only_what_is_compiled(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog ends a worker whose compiler hangs."""
    progressed: list[tuple[int, int]] = []
    steps = iter([(0, 2), (0, 2), (1, 2), (1, 2), (2, 2)])

    def compiled(sets: object, on_progress: native_build.Progress) -> Path:
        deadline = time.monotonic() + PATIENCE_S
        for step in steps:
            on_progress(*step)
            while step not in progressed:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(0.02)
        return Path("library.so")

    monkeypatch.setattr(native_build, "POLL_S", 0.001)
    monkeypatch.setattr(native_build, "_found_or_compiled", compiled)
    building = native_build.Building(())
    assert building.result(lambda: progressed.append(building.progress)) == Path("library.so")
    assert [one for one in progressed if one[1]] == [(0, 2), (1, 2), (2, 2)]
