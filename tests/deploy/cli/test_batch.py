"""`sluice batch` against the app: outcomes in the input's order, and what an interrupted run leaves."""

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.batch import Progress, batch, read_lines
from deploy.launcher.child_command import CliError
from frontend.errors import Overloaded
from frontend.text.tokenizer import Tokenizer
from shared.config.declaration import ConfigError
from tests.fakes import FakePool, sending, tokenizer
from tests.frontend.serving import app_over, serving


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


def line(number: int, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": f"a {number}", "max_tokens": 5} | more
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


async def test_lines_are_answered_in_order_and_a_run_goes_on(small: Tokenizer, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [*map(line, range(6)), line(6, prompt="")]), tmp_path / "out.jsonl"
    earlier = {"id": "r", "custom_id": "id-2", "response": {"status_code": 200, "body": "earlier"}, "error": None}
    (tmp_path / "out.jsonl.part").write_text(json.dumps(earlier) + '\n{"custom_id": "id-3", "resp')
    pool = FakePool(sending([1, 2]))
    pool.refusals[1] = Overloaded("full", code="queue_full", retry_after=1.0)
    async with serving(app_over(pool, small)) as url:
        code = await asyncio.to_thread(batch, [str(source), "--out", str(out), "--url", url, "--concurrency", "3"])
    outcomes = [json.loads(one) for one in out.read_text().splitlines()]
    assert [one["custom_id"] for one in outcomes] == [f"id-{number}" for number in range(7)]
    assert [one["response"]["status_code"] for one in outcomes] == [200] * 6 + [400] and code == 1
    assert outcomes[2]["response"]["body"] == "earlier" and outcomes[3]["response"]["body"]["choices"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([line(1), line(1)], "line 2: `custom_id`"), ([line(1, stream=True)], "line 1: `body`"),
        ([line(1), {"custom_id": "x"}], "line 2: needs"), ([line(1) | {"url": "v1"}], "line 1: `url`"),
        ([], "no lines"),
    ],
)  # fmt: skip
def test_wrong_lines_are_named(tmp_path: Path, wrong: list[Any], said: str) -> None:
    with pytest.raises(CliError, match=said):
        read_lines(write(tmp_path / "in.jsonl", wrong))


def test_progress_says_how_far_it_is(tmp_path: Path) -> None:
    asked = read_lines(write(tmp_path / "in.jsonl", [line(1), line(2)]))
    with closing(Progress(tmp_path / "part", asked)) as progress:
        progress.add(asked[1], 400, b"{}", "r")
        assert progress.line().startswith(f"[{'#' * 15}{' ' * 15}] 1/2  1 failed")


def test_progress_says_why_nothing_goes_on(tmp_path: Path) -> None:
    asked = read_lines(write(tmp_path / "in.jsonl", [line(1)]))
    with closing(Progress(tmp_path / "part", asked)) as progress:
        progress.wait("no answer from http://h: Connection refused; trying again")
        assert "Connection refused; trying again" in progress.line()
        progress.wait("")
        assert "Connection" not in progress.line()


@pytest.mark.parametrize("data", ["{}\n", "\0\n", "[1]\n", '{"custom_id": 5, "response": {"status_code": 200}}\n'])
def test_a_file_that_another_program_wrote_is_named_and_stays(tmp_path: Path, data: str) -> None:
    source, part = write(tmp_path / "in.jsonl", [line(1)]), tmp_path / "in.out.jsonl.part"
    part.write_text(data)
    with pytest.raises(CliError, match=r"in\.out\.jsonl\.part, line 1"):
        batch([str(source)])
    assert part.read_text() == data


def test_a_file_that_another_command_writes_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line(1)])
    part = tmp_path / "in.out.jsonl.part"
    with closing(Progress(part, read_lines(source))), pytest.raises(CliError, match="another `sluice batch`"):
        batch([str(source)])


@pytest.mark.parametrize(("out", "said"), [("in.jsonl", "would be lost"), ("none/x", "--out"), (".", "--out")])
def test_out_that_cannot_be_written_is_refused_before_a_line_is_sent(tmp_path: Path, out: str, said: str) -> None:
    source = write(tmp_path / "in.jsonl", [line(1)])
    before = source.read_bytes()
    with pytest.raises(ConfigError, match=said):
        batch([str(source), "--out", str(tmp_path / out)])
    assert source.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
