"""Tests of frontend/workers/membership.py."""

from pathlib import Path

from frontend.workers.membership import Discovery
from shared.address import parse, parse_all


def test_workers_file_is_reread_and_errors_keep_the_addresses(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    places = Discovery(parse_all("ipc:///a"), file)
    assert places.changing and places.resolve() == [parse("ipc:///a")]  # the second worker is not there yet
    file.write_text("# ours\nipc:///b ipc:///a\n\ntcp://10.0.0.1:7 # far away\n")
    three = [parse("ipc:///a"), parse("ipc:///b"), parse("tcp://10.0.0.1:7")]
    assert places.resolve() == three
    file.write_text("nonsense")
    assert places.resolve() == three
    file.unlink()
    assert places.resolve() == three
    file.write_text("")
    assert places.resolve() == [parse("ipc:///a")]


def test_host_name_resolves_to_all_its_addresses() -> None:
    answers: list[list[str] | None] = [["10.0.0.2", "10.0.0.1"], None, ["10.0.0.3"]]

    def look_up(host: str) -> list[str]:
        answer = answers.pop(0)
        if answer is None:
            raise OSError(f"{host} is not known")
        return answer

    places = Discovery(parse_all("tcp://workers.svc:5700, tcp://10.9.9.9:1"), look_up=look_up)
    assert places.changing and not Discovery(parse_all("tcp://10.9.9.9:1")).changing
    names = [[one.events for one in places.resolve()] for _ in range(3)]
    assert names[0] == names[1] == ["tcp://10.0.0.2:5701", "tcp://10.0.0.1:5701", "tcp://10.9.9.9:2"]
    assert names[2] == ["tcp://10.0.0.3:5701", "tcp://10.9.9.9:2"]
