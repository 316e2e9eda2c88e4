"""Where a request goes, and where workers are said to be: all of it without a socket."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.workers.discovery import Discovery
from frontend.workers.routing import (
    AFFINITY_MARGIN,
    EXPECTED_TOKENS,
    OTHER_REQUEST_TOKENS,
    PrefixAffinity,
    choose,
    load,
    prefix_hashes,
)
from frontend.workers.stream import Stream
from shared.address import parse, parse_all
from shared.codec import pack_u32
from shared.config import ConfigError, Settings, with_values
from shared.messages import Sampling, Status, Submit, WorkerState
from shared.settings_check import check

LOADS = st.lists(st.integers(0, 10**6), min_size=1, max_size=6)


@given(LOADS, st.integers(0, 10))
def test_nobody_is_preferred_to_the_least_loaded(loads: list[int], turn: int) -> None:
    assert loads[choose(loads, (), turn)] == min(loads)


@given(st.integers(1, 6))
def test_equals_take_turns(count: int) -> None:
    turn, taken = 0, []
    for _ in range(2 * count):
        taken.append(choose([7] * count, (), turn))
        turn = taken[-1] + 1
    assert taken == [*range(count)] * 2


@given(LOADS, st.lists(st.sets(st.integers(0, 5)), max_size=4))
def test_a_known_beginning_wins_until_it_costs_too_much(loads: list[int], knowing: list[set[int]]) -> None:
    knowing = [{i for i in workers if i < len(loads)} for workers in knowing]
    chosen, least = choose(loads, knowing), min(loads)
    bearable = least + max(AFFINITY_MARGIN, least // 4)
    wanted = next((near for workers in knowing if (near := {i for i in workers if loads[i] <= bearable})), set())
    assert chosen in wanted if wanted else loads[chosen] == least


def test_the_longest_known_beginning_comes_first() -> None:
    assert choose([0, 10, 20], [[2], [1, 2]]) == 2
    assert choose([0, 10, AFFINITY_MARGIN + 1], [[2], [1, 2]]) == 1


def test_a_beginning_is_known_by_its_tokens_and_its_salt() -> None:
    short, long = pack_u32(range(100)), pack_u32(range(300))
    known = PrefixAffinity(size=3)
    known.remember(prefix_hashes(short, ""), "a")
    assert known.workers_with(prefix_hashes(long, "")) == [{"a"}]
    assert (
        known.workers_with(prefix_hashes(long, "tenant"))
        == known.workers_with(prefix_hashes(pack_u32(range(1, 101)), ""))
        == []
    )
    assert prefix_hashes(pack_u32(range(20)), "") == []  # too short to be worth it
    known.remember(prefix_hashes(long, ""), "b")
    assert known.workers_with(prefix_hashes(long, "")) == [{"b"}, {"a", "b"}]
    known.forget("b")
    assert known.workers_with(prefix_hashes(short, "")) == [{"a"}]
    known.remember(range(10), "c")
    assert len(known) == 3


def test_load_is_what_may_still_have_to_be_computed() -> None:
    loop = asyncio.new_event_loop()
    fresh = Stream(Submit(1, pack_u32(range(50)), Sampling(20)), loop.create_future())
    begun = Stream(Submit(2, pack_u32(range(50)), Sampling(20)), loop.create_future(), output=[1, 2, 3])
    endless = Stream(Submit(3, pack_u32(range(50)), Sampling(10**6)), loop.create_future(), output=[1])
    loop.close()
    assert [load([s], None) for s in (fresh, begun, endless)] == [70, 17, EXPECTED_TOKENS]
    status = Status(1, 1, "m", "cpu", "float32", WorkerState.READY, running=3, waiting=1, waiting_tokens=90)
    assert load([fresh, begun], status) == 70 + 17 + 2 * OTHER_REQUEST_TOKENS + (90 - 50)


@pytest.mark.parametrize(
    ("text", "requests", "events"),
    [
        ("tcp://gpu:5700", "tcp://gpu:5700", "tcp://gpu:5701"),
        ("tcp://[::1]:5", "tcp://[::1]:5", "tcp://[::1]:6"),
        ("ipc:///run/a/", "ipc:///run/a/requests.sock", "ipc:///run/a/events.sock"),
    ],
)
def test_one_word_names_both_sockets(text: str, requests: str, events: str) -> None:
    assert (parse(text).requests, parse(text).events) == (requests, events)


@pytest.mark.parametrize("text", ["gpu:5700", "tcp://gpu", "tcp://gpu:65535", "tcp://:1", "ipc://a", "http://a:1"])
def test_an_address_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--worker-addresses.*tcp://HOST:PORT or ipc:///FOLDER, not"):
        check(with_values(Settings(), {"worker_addresses": text, "insecure": True}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"workers": 0}, "--workers 0 needs"),
        ({"worker_addresses": "tcp://a:1"}, "--curve-dir"),
        (
            {"workers": 2, "request_address": "ipc:///a", "event_address": "ipc:///b"},
            "cannot be combined with --workers",
        ),
        ({"workers_file": "f", "request_address": "ipc:///a"}, "cannot be combined with --workers-file"),
    ],
)
def test_settings_that_do_not_fit_are_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(with_values(Settings(), values))


def test_a_file_is_read_again_when_it_changes_and_trouble_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    places = Discovery(parse_all("ipc:///a"), file)
    assert places.changing and places.resolve() == [parse("ipc:///a")]  # not there yet
    file.write_text("# ours\nipc:///b ipc:///a\n\ntcp://10.0.0.1:7 # far away\n")
    three = [parse("ipc:///a"), parse("ipc:///b"), parse("tcp://10.0.0.1:7")]
    assert places.resolve() == three
    file.write_text("nonsense")
    assert places.resolve() == three
    file.unlink()
    assert places.resolve() == three
    file.write_text("")
    assert places.resolve() == [parse("ipc:///a")]


def test_a_host_stands_for_all_its_addresses() -> None:
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
