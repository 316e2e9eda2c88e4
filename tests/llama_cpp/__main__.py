"""Runs llama.cpp's own tests of its server against Sluice, and prints how many pass, as a Markdown table.

The tests come from llama.cpp's source tree, which the source distribution of llama-cpp-python contains below
vendor/llama.cpp; this repository holds no part of them. plugin.py replaces llama.cpp's program and models, and unmet.py
lists the tests that ask for something that Sluice does not have.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.e2e.server import free_port

ROOT = Path(__file__).parents[2]
OUTCOMES = ("passed", "failed", "not offered", "own model", "skipped")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.llama_cpp", description=__doc__)
    parser.add_argument("source", type=Path, help="folder of llama.cpp's source tree")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, such as unit/test_completion.py or -k infill")
    parser.add_argument("--json", type=Path, help="file to which the outcome and the reason of each test are written")
    asked, more = parser.parse_known_args()
    tests = asked.source.resolve() / "tools/server/tests"
    if not (tests / "utils.py").exists():
        parser.error(f"{asked.source} is not llama.cpp's source tree: {tests / 'utils.py'} does not exist")
    with tempfile.TemporaryDirectory() as folder:
        results = asked.json.resolve() if asked.json else Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", "-p", "tests.llama_cpp.plugin", "-p", "no:cacheprovider"]
        command += [
            "-q",
            "-rf",
            "--tb=short",
            "--rootdir",
            str(tests),
            "-c",
            str(tests / "pytest.ini"),
            "-m",
            "not slow",
        ]
        places = {"PYTHONPATH": str(ROOT), "SLUICE_TEST_RESULTS": str(results), "SLUICE_TEST_STAND_INS": folder}
        places["PORT"] = str(free_port())
        subprocess.run([*command, *asked.pytest, *more], cwd=tests, env=os.environ | places, check=False)
        if not results.exists():
            return 1  # pytest has printed the reason
        print(table(json.loads(results.read_text())))
    return 0


def table(results: dict[str, dict[str, str]]) -> str:
    """Returns a table with a row for each file and a row for all. results: test name → (outcome, reason)"""
    files: dict[str, Counter[str]] = {}
    for name, result in results.items():
        files.setdefault(Path(name.partition("::")[0]).name, Counter())[result["outcome"]] += 1
    rows = [*sorted(files.items()), ("**all**", sum(files.values(), Counter()))]
    lines = [f"| file | {' | '.join(OUTCOMES)} |", "|---|" + "--:|" * len(OUTCOMES)]
    lines += [f"| {name} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} |" for name, counts in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
