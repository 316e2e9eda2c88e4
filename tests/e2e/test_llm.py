"""The Python API with the embedded model and a worker gives the server's answers, and leaves no process behind."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli.main import main
from deploy.launcher import embedded_worker
from deploy.launcher.child_command import DEMO_MODEL
from deploy.offline.llm import LLM, CannotStart
from frontend.errors import SluiceError
from tests.e2e.held import Hold
from tests.e2e.server import ROOT, Server
from tests.patience import PATIENCE_S

PROMPTS = ["Once upon a time", "The capital of", "One day, a little frog", "The sun"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = 0.0


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hold]:
    """Holds the worker that an LLM starts."""
    hold = Hold(tmp_path_factory.mktemp("llm") / "hold")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded_worker, "command_line", hold.command(embedded_worker.command_line))
        yield hold


@pytest.fixture(scope="module")
def llm(hold: Hold) -> Iterator[LLM]:
    with LLM("demo", threads=1, max_batch_size=2, max_waiting_requests=1) as running:
        pid = worker_of(running)
        assert alive(pid)
        yield running
    assert not alive(pid)


def worker_of(llm: LLM) -> int:
    [child] = [int(pid) for pid in children(os.getpid()) if b"\0worker\0" in command(pid)]
    return child


def children(pid: int) -> list[str]:
    """Children of all threads of the process; threads that end meanwhile have none."""
    found: list[str] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += (task / "children").read_text().split()
    return found


def command(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_dead(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while alive(pid):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.02)


def test_its_ids_are_the_servers(llm: LLM, demo: Server) -> None:
    """There are more prompts than the worker can hold at once."""
    prompts = [*PROMPTS, *PROMPTS]
    answers = llm.complete(prompts, max_tokens=24, temperature=GREEDY)
    for prompt, answer in zip(prompts, answers, strict=True):
        said = demo.events(prompt, 24)
        assert (list(answer.ids), answer.text) == (said.ids, said.text)
        assert said.done is not None
        assert said.done["finish_reason"] == answer.finish
        assert said.done["usage"]["completion_tokens"] == answer.usage.completion_tokens


def test_every_form_gives_the_same_text(llm: LLM) -> None:
    texts = [llm.generate(prompt, max_tokens=16, temperature=GREEDY) for prompt in PROMPTS]
    assert llm.generate(PROMPTS, max_tokens=16, temperature=GREEDY) == texts
    assert "".join(llm.generate(PROMPTS[0], stream=True, max_tokens=16, temperature=GREEDY)) == texts[0]
    gained = [""] * len(PROMPTS)
    for index, text in llm.generate(PROMPTS, stream=True, max_tokens=16, temperature=GREEDY):
        gained[index] += text
    assert gained == texts

    async def read(prompt: str) -> str:
        return "".join([text async for text in llm.generate_async(prompt, max_tokens=16, temperature=GREEDY)])

    async def read_all() -> list[str]:
        return await asyncio.gather(*map(read, PROMPTS))

    assert asyncio.run(read_all()) == texts
    ids = llm.tokenizer.encode_now([PROMPTS[0]])[0]
    assert llm.generate(ids, max_tokens=16, temperature=GREEDY) == texts[0]


def test_a_seed_gives_the_same_answer_here_and_there(llm: LLM, demo: Server) -> None:
    [answer] = llm.complete("Once", max_tokens=16)
    said = demo.events("Once", 16, temperature=1.0, seed=answer.seed)
    assert said.ids == list(answer.ids)


def test_chats_are_the_servers(llm: LLM, demo: Server) -> None:
    body = {"model": "m", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    said = demo.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert said
    assert llm.chat(QUESTION, temperature=GREEDY, max_tokens=24) == said
    assert "".join(llm.chat(QUESTION, stream=True, temperature=GREEDY, max_tokens=24)) == said


def test_a_stream_survives_its_worker(llm: LLM, hold: Hold) -> None:
    [whole] = llm.complete(PROMPTS[0], max_tokens=60, temperature=GREEDY, ignore_eos=True)
    with hold.at(30):
        stream = llm.generate(PROMPTS[0], stream=True, max_tokens=60, temperature=GREEDY, ignore_eos=True)
        text = next(stream)
        hold.wait()
        before = worker_of(llm)
        os.kill(before, signal.SIGKILL)
        hold.release()
        assert text + "".join(stream) == whole.text
    assert worker_of(llm) != before


def test_a_model_that_cannot_be_served_is_told_in_the_workers_last_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus", "architectures": ["Abacus"]}')
    with pytest.raises(CannotStart, match=r"tokenizer\.json"):
        LLM(tmp_path, threads=1)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    with pytest.raises(CannotStart, match=r"the worker cannot start: .*(abacus|Abacus)"):
        LLM(tmp_path, threads=1)
    assert [pid for pid in children(os.getpid()) if str(tmp_path).encode() in command(pid)] == []


SCRIPT = """
import sys, time
from sluice import LLM
llm = LLM("demo", threads=1)
print(llm._runner.service.pool.membership.statuses()[0].status.pid, flush=True)
print(llm.generate("Once upon a time", max_tokens=4, temperature=0), flush=True)
time.sleep(float(sys.argv[1]))
"""


def script(seconds: float) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(seconds)], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def test_no_worker_outlives_a_script_that_just_ends_or_is_killed() -> None:
    with script(0) as ends, script(PATIENCE_S) as killed:
        assert ends.stdout is not None and ends.stderr is not None
        assert killed.stdout is not None
        pids = [int(run.stdout.readline()) for run in (ends, killed) if run.stdout is not None]
        assert killed.stdout.readline() == ", there was a\n"
        killed.kill()
        until_dead(pids[1])
        assert ends.wait(PATIENCE_S) == 0
        assert not alive(pids[0])
        assert (ends.stdout.read(), ends.stderr.read()) == (", there was a\n", "")


def test_the_terminals_commands_with_the_real_server(demo: Server, capsys: pytest.CaptureFixture[str]) -> None:
    said = demo.events(PROMPTS[0], 16)
    flags = ["--url", demo.url, "--temperature=0", "--max-tokens=16"]
    assert main(["complete", PROMPTS[0], *flags]) == 0
    assert capsys.readouterr().out == said.text + "\n"
    assert main(["complete", PROMPTS[0], *flags, "--model=other"]) == 1
    assert "the model `other` does not exist; this server serves `m`" in capsys.readouterr().err


def test_receipt_of_a_server_is_checked_without_it(llm: LLM, demo: Server) -> None:
    sent = {"messages": QUESTION, "max_tokens": 20, "receipt": True}
    receipt = demo.client.post("/v1/chat/completions", json=sent).json()["choices"][0]["receipt"]
    verdict = llm.verify(receipt, sent)
    assert verdict["identical"] and verdict["fingerprint_matches"]
    wrong = llm.verify(receipt | {"output_ids": [5, *receipt["output_ids"][1:]]}, sent)
    assert (wrong["identical"], wrong["position"]) == (False, 0)
    with pytest.raises(SluiceError, match="the receipt was made with the fingerprint fp_other"):
        llm.verify(receipt | {"fingerprint": "fp_other"}, sent)
