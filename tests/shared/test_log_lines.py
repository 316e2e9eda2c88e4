"""Tests of shared/log.py."""

import json
import subprocess
import sys

import pytest

from shared.log import LOG_START, is_json_wanted, json_line
from tests.patience import PATIENCE_S

PROGRAM = """
import logging, sys, threading, warnings
from shared.log import set_up
set_up("info", as_json=True)
logging.getLogger("a.library").warning("two\\nlines %s", "\\u00fc")
logging.getLogger("a.library").debug("too quiet")
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("it failed")
warnings.warn("look out")
print("printed", file=sys.stderr)
thread = threading.Thread(target=lambda: [][1])
thread.start()
thread.join()
raise ValueError("the end")
"""


def test_every_line_of_a_process_is_a_json_object() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE_S)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all(line.startswith(LOG_START) for line in done.stderr.splitlines())
    told = [(line["level"], line["message"].split(":")[0]) for line in lines if line.get("logger") != "py.warnings"]
    assert told == [
        ("warning", "two\nlines ü"), ("error", "it failed"), ("info", "printed"), ("critical", "IndexError"),
        ("critical", "ValueError"),
    ]  # fmt: skip
    assert [line["logger"] for line in lines if "look out" in line["message"]] == ["py.warnings"]
    assert "ZeroDivisionError" in lines[1]["exception"] and "Traceback" in lines[-1]["exception"]
    assert lines[0]["logger"] == "a.library" and "exception" not in lines[0]


def test_line_survives_text_that_is_not_unicode() -> None:
    assert json.loads(json_line("info", "\udcff", process=None).encode("utf-8", "backslashreplace"))["level"] == "info"


@pytest.mark.parametrize(
    ("words", "variable", "wanted"),
    [
        (["serve", "--log-format", "json"], "", True),
        (["serve", "--log-format=json", "--nonsense"], "text", True),
        (["serve", "--log-format=text"], "json", False),
        (["serve"], "json", True),
        ([], "", False),
    ],
)
def test_json_is_wanted_by_flag_or_variable(words: list[str], variable: str, wanted: bool) -> None:
    assert is_json_wanted(words, {"SLUICE_LOG_FORMAT": variable}) == wanted
