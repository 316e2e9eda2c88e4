"""A worker serves plain requests without the modules of any feature.

A room is the modules of one feature. A request that needs a missing room is refused or fails with a message; it is
never served without the feature.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import Checkpoints
from tests.patience import PATIENCE_S
from tests.worker.rooms import LENGTH, ROOMS

ROOT = Path(__file__).parents[2]
SERVED = {
    "checks": ["checked"], "scores": ["length", "length"], "pooling": ["pooled"], "grammars": ["length", "length"],
    "mirostat": ["length"], "drafts": ["made"], "states": ["made"],
    "adapters": ["this worker was started without adapters"],
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(checkpoints: Checkpoints) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.worker.rooms", str(checkpoints("llama"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("room", ROOMS)
def test_plain_requests_need_no_room(room: str, answers: dict[str, Any]) -> None:
    assert answers[room]["plain"] == answers["none"]["plain"]
    assert [len(ids) for ids in answers[room]["plain"]] == [LENGTH, LENGTH]


@pytest.mark.parametrize("room", ROOMS)
def test_requests_for_a_missing_room_are_refused_in_words_and_no_others(room: str, answers: dict[str, Any]) -> None:
    missing = {"none": set[str](), "all": set(SERVED)}.get(room, {room})
    for feature, ends in answers[room]["ends"].items():
        if feature not in missing:
            assert ends == SERVED[feature], feature
            continue
        for words in ends:
            named = any(module in words for module in ROOMS[feature])
            assert named or words == "this worker cannot compile grammars", (feature, words)
