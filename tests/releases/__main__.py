"""Tries all releases in all forms, and writes docs/releases.md; with names, tries only these and prints the outcomes.

    python -m tests.releases [NAME ...]

It ends with an error if a release is served with wrong logits, or the facts are not those of transformers' class.
"""

import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from tests.releases.page import PAGE, page
from tests.releases.trial import BY_NAME, Case, Outcome, cases, label, try_case


def main(names: Sequence[str]) -> int:
    tried: dict[Case, Outcome] = {}
    files: dict[tuple[str, str], Outcome] = {}  # several releases have GGUF files of one architecture
    for case in cases():
        if names and not any(name in case[0] for name in names):
            continue
        file = (BY_NAME[case[0]].gguf, case[2])
        with tempfile.TemporaryDirectory() as folder:
            found = files.get(file) if case[1] == "gguf" else None
            outcome = tried[case] = found or try_case(case, Path(folder) / "tried")
        if case[1] == "gguf":
            files[file] = outcome
        print(f"{case[0]} · {label(case)}: {outcome.result} {outcome.why}", flush=True)
    if not names:
        PAGE.write_text(page(tried, str(date.today())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
