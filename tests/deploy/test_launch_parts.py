"""What the supervisor stands on: log lines, listening sockets, the run folder, the words for a ready server."""

import errno
import io
import itertools
import json
import os
import shlex
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.cli.reload import reload
from deploy.supervisor.child_command import CliError
from deploy.supervisor.console import Console, LineSplitter
from deploy.supervisor.listen_sockets import ListenError, is_taken, listen, reachable, url
from deploy.supervisor.readiness import ready_message
from deploy.supervisor.run_dir import RunDirError, run_dir, running_servers


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\r\n"))), st.lists(st.integers(0, 200)))
def test_lines_are_whole_however_they_were_cut(texts: list[str], cuts: list[int]) -> None:
    data = "".join(text + "\n" for text in texts).encode("utf-8", "surrogatepass")
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    lines = LineSplitter()
    found = [line for a, b in itertools.pairwise(places) for line in lines.feed(data[a:b])]
    assert found == [text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for text in texts]
    assert lines.close() == []


def test_odd_lines() -> None:
    lines = LineSplitter(limit=8)
    assert lines.feed(b"10 %\r50 %\r\n\xff\nlast") == ["50 %", "\N{REPLACEMENT CHARACTER}"]
    assert lines.close() == ["last"]
    assert lines.feed(b"longer than that") == ["longer than that"]


def test_names_are_aligned_and_a_file_gets_no_colours() -> None:
    output = io.StringIO()
    console = Console(output, ("worker", "frontend 0"))
    console.line("worker", "a")
    console.line("frontend 0", "b")
    assert output.getvalue() == "worker     | a\nfrontend 0 | b\n"


def test_an_object_of_json_goes_to_machines_as_it_is() -> None:
    people, machines = io.StringIO(), io.StringIO()
    console = Console(people, ("frontend",), machines)
    console.line("frontend", '{"path":"/x"}')
    console.line("frontend", "{ braces")
    assert machines.getvalue() == '{"path":"/x"}\n' and people.getvalue() == "frontend | { braces\n"


def test_a_terminal_has_colours_and_a_bar_below_the_lines() -> None:
    output = Terminal()
    console = Console(output, ("worker",))
    console.progress(0.5, "loading")
    console.line("worker", "a")
    console.clear_progress()
    console.print("b")
    text = output.getvalue()
    assert text.index("50 %  loading") < text.index("worker |") < text.rindex("50 %  loading")
    assert "\x1b[36mworker |" in text
    assert text.endswith("\r\x1b[Kb\n")


def test_elsewhere_progress_is_a_line_a_tenth() -> None:
    output = io.StringIO()
    console = Console(output)
    for percent in range(0, 101, 2):
        console.progress(percent / 100, f"loading {percent}%")
    assert output.getvalue().splitlines() == ["loading", *(f"loading: {tenth} %" for tenth in range(0, 101, 10))]


def test_a_reader_that_went_away_is_no_reason_to_stop() -> None:
    output = io.StringIO()
    console = Console(output)
    output.close()
    console.print("nobody reads this")


def test_sockets_share_one_port_that_nobody_else_may_have() -> None:
    sockets = listen("127.0.0.1", 0, count=3)
    port = reachable(sockets[0])[1]
    assert {one.getsockname()[1] for one in sockets} == {port}
    assert is_taken("127.0.0.1", port)
    with pytest.raises(ListenError, match=f"port {port} is already in use"):
        listen("127.0.0.1", port)
    for one in sockets:
        one.close()
    assert not is_taken("127.0.0.1", port)


def test_a_port_that_was_just_given_up_can_be_had_again() -> None:
    [listener] = listen("127.0.0.1", 0)
    client = socket.create_connection(reachable(listener))
    listener.setblocking(True)
    accepted, _ = listener.accept()
    port = reachable(listener)[1]
    for one in (accepted, listener, client):  # leaves TIME_WAIT behind
        one.close()
    [again] = listen("127.0.0.1", port)
    again.close()


def test_an_address_that_is_not_ours_is_one_sentence() -> None:
    with pytest.raises(ListenError, match="cannot listen on"):
        listen("203.0.113.1", 80)
    with pytest.raises(ListenError, match="cannot listen on --host"):
        listen("no such host", 80)
    with pytest.raises(ListenError, match=r"cannot listen on --host a\.\.b: that is not a host name"):
        listen("a..b", 80)


def test_everywhere_is_shown_as_loopback() -> None:
    [listener] = listen("0.0.0.0", 0)
    with listener:
        assert url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_run_folder_is_private_and_goes_with_its_server(temporary: Path) -> None:
    with run_dir() as folder:
        assert folder.parent == temporary
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / "metrics").is_dir()
    assert not folder.exists()


def test_a_given_run_folder_stays_and_belongs_to_one_server(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    with run_dir(str(folder)), pytest.raises(RunDirError, match="belongs to a running server"), run_dir(str(folder)):
        pass
    assert folder.is_dir()
    with run_dir(str(folder)) as again:
        assert again == folder
    with pytest.raises(RunDirError, match="too long"), run_dir(str(tmp_path / ("x" * 100))):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="cannot use"), run_dir(str(tmp_path / "file")):
        pass


def test_folders_of_killed_servers_are_swept_and_those_of_living_ones_are_not(temporary: Path) -> None:
    dead = temporary / "sluice-run-dead"
    dead.mkdir()
    (dead / "lock").write_text("1")
    young = temporary / "sluice-run-young"  # another server is about to lock it
    young.mkdir()
    (young / "lock").touch()
    with run_dir() as living, run_dir():
        assert living.exists() and young.exists()
        assert not dead.exists()


def test_whatever_is_wrong_with_a_run_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lock", "metrics"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "lock").mkdir() if name == "lock" else (folder / "metrics").touch()
        with pytest.raises(RunDirError, match=f"cannot use --run-dir {folder}: "), run_dir(str(folder)):
            pass

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(RunDirError, match="name one with --run-dir"), run_dir():
        pass
    assert running_servers() == []


def test_the_welcome_can_be_pasted() -> None:
    text = ready_message("http://127.0.0.1:8000", "it's mine", keys=True)
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("  curl")]
    bodies = [json.loads(words[-1]) for words in commands]
    assert [body["model"] for body in bodies] == ["it's mine", "it's mine"]
    assert [body.get("stream_format") for body in bodies] == [None, "events"]
    assert all("Authorization: Bearer $API_KEY" in words for words in commands)
    assert "Authorization" not in ready_message("http://127.0.0.1:8000", "demo", keys=False)


def test_servers_that_live_are_found_and_dead_ones_are_not(temporary: Path) -> None:
    (temporary / "sluice-run-dead").mkdir()
    (temporary / "sluice-run-dead" / "lock").write_text("1")
    assert running_servers() == []
    with pytest.raises(CliError, match="no server runs"):
        reload([])
    with run_dir() as folder:
        assert running_servers() == running_servers(str(folder)) == [os.getpid()]
        with run_dir(), pytest.raises(CliError, match="2 servers run here; send SIGHUP to one"):
            reload([])
    with pytest.raises(CliError, match="no server runs in"):
        reload(["--run-dir", str(folder)])
