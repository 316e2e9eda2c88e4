"""The files of a record: their sizes, their number, their modes, and several processes."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from frontend.observability.recording import RecordFiles
from shared.config.declaration import ConfigError
from shared.record import older_files
from tests.strangers import give_away


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "record"


def write(files: RecordFiles, numbers: Sequence[int]) -> None:
    for number in numbers:
        line = b"%03d\n" % number
        assert files.write(line) == len(line)


def numbers(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()]


def test_full_file_is_renamed_and_only_the_newest_files_are_kept(file: Path) -> None:
    files = RecordFiles(str(file), 8, 3)
    write(files, range(9))
    assert {path.name: numbers(path) for path in file.parent.iterdir()} == {
        "record.2": [4, 5], "record.1": [6, 7], "record": [8]
    }  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == {0o600}


def test_fewer_files_than_before_delete_the_oldest(file: Path) -> None:
    write(RecordFiles(str(file), 4, 9), range(6))
    write(RecordFiles(str(file), 4, 2), [6])
    assert older_files(file).keys() == {1} and numbers(file) == [6]


def test_one_file_begins_anew_and_no_limit_never_does(file: Path) -> None:
    write(RecordFiles(str(file), 8, 1), range(3))
    assert numbers(file) == [2] and not older_files(file)
    write(RecordFiles(str(file), 0, 1), range(3, 30))
    assert numbers(file) == [*range(2, 30)]


def test_several_writers_lose_and_repeat_no_line(file: Path) -> None:
    writers = [RecordFiles(str(file), 20, 100) for _ in range(3)]
    for number in range(60):
        write(writers[number * 7 % 3], [number])
    found = [number for path in file.parent.iterdir() for number in numbers(path)]
    assert sorted(found) == [*range(60)] and len(older_files(file)) >= 9


def test_file_that_somebody_moved_is_made_again(file: Path) -> None:
    files = RecordFiles(str(file), 0, 1)
    write(files, [1])
    file.rename(file.with_name("moved"))
    write(files, [2])
    assert (numbers(file), numbers(file.with_name("moved"))) == ([2], [1])


@pytest.mark.parametrize("failing", ["open", "rename"])
def test_full_disk_that_allows_no_new_file_costs_no_line(
    file: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    files = RecordFiles(str(file), 8, 3)
    with monkeypatch.context() as patched:
        patched.setattr(os, failing, full)
        write(files, range(7))
    write(files, range(7, 9))
    assert sorted(number for path in file.parent.iterdir() for number in numbers(path)) == [*range(9)]


def test_existing_file_that_others_may_read_is_closed(file: Path) -> None:
    file.touch()
    file.chmod(0o644)
    RecordFiles(str(file), 0, 1)
    assert file.stat().st_mode & 0o777 == 0o600


def test_file_of_another_user_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from frontend.observability.recording import Recorder

    file.touch()
    give_away(file, monkeypatch)
    with pytest.raises(ConfigError, match=r"--record .*record cannot be written: it belongs to another user"):
        Recorder.to(str(file), 0, 1)


def test_pipe_is_written_without_any_renaming(file: Path) -> None:
    os.mkfifo(file)
    reading = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    write(RecordFiles(str(file), 4, 2), range(3))
    assert os.read(reading, 100) == b"000\n001\n002\n" and not older_files(file)
    os.close(reading)
