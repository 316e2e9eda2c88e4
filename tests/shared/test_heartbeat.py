"""The heartbeat file."""

import shutil
from pathlib import Path

from shared.heartbeat import Heartbeat, Phase


def test_heartbeat_is_read_by_others_of_the_same_user(tmp_path: Path) -> None:
    writer, reader = Heartbeat(tmp_path / "heartbeat"), Heartbeat(tmp_path / "heartbeat")
    writer.alive()
    writer.progress()
    writer.phase = Phase.LOADING
    writer.body[:2] = b"hi"
    assert (reader.alive_count, reader.progress_count, reader.phase, bytes(reader.body[:2])) == (
        1,
        1,
        Phase.LOADING,
        b"hi",
    )
    assert (tmp_path / "heartbeat").stat().st_mode & 0o077 == 0


def test_deleted_heartbeat_is_recreated_for_the_next_process(tmp_path: Path) -> None:
    file = tmp_path / "run" / "heartbeat"
    file.parent.mkdir()
    owner = Heartbeat(file)
    owner.body[:2] = b"hi"
    owner.blamed = True
    shutil.rmtree(file.parent)
    owner.start()
    following = Heartbeat(file)
    assert following.blamed and bytes(following.body[:2]) == b"hi"
    following.phase = Phase.SERVING
    assert owner.phase is Phase.SERVING and file.parent.stat().st_mode & 0o077 == 0
    (tmp_path / "file").touch()
    owner.file = tmp_path / "file" / "heartbeat"  # a file that cannot be created
    owner.start()
