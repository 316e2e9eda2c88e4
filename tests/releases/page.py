"""docs/releases.md: which releases are served in which forms, and the day on which they were tried."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from deploy.generate.docs_api import table
from tests.releases.releases import RELEASES
from tests.releases.trial import SERVED, Case, Outcome, label

PAGE = Path(__file__).parents[2] / "docs" / "releases.md"
BEGIN = """# Releases that were tried

The models that people fetch most, and for each the forms in which they fetch it. `python -m tests.releases` tries them
and writes this page; tests try a twelfth of them again each day.

A trial has no file of the release itself. It has facts: the class and the config, the names and shapes of the tensors,
and the `quantization_config` as files on the hub have it. From these a checkpoint is written with random weights, of
small sizes and with two to five layers, in shards with an index. It is loaded, and a request is answered. The logits
of a checkpoint in bfloat16 must be those of transformers' own class, which must know all names. The logits of a form of
few bits must be those of its numbers in full precision. GGUF files are those of the release's architecture, with the
mix of types that the form has. An MTP head must load.

Vision towers, chat templates and real weights are not tried here: see [images](images-in-chat.md), and
[the results](../bench/RESULTS.md) with real models.
"""
FACTS = """## Where the facts are from

The names of tensors and the fields of the config are from the sources below. Where the config itself could not be seen,
the row says that it is assumed. The `quantization_config` of a form is that of the library that writes it, which also
lists the linears in full precision in its own way; which linears these are in a given file is assumed.
"""


def row(model: str, outcomes: Mapping[str, Outcome], day: str) -> list[str]:
    """Returns a row of the table. outcomes: by the name of the form"""
    served = ", ".join(form for form, outcome in outcomes.items() if outcome.result == SERVED)
    refused = "; ".join(
        f"{form}: {first_clause(outcome.why)}" for form, outcome in outcomes.items() if outcome.result != SERVED
    )
    return [model, served or "none", refused or "none", day]


def first_clause(why: str) -> str:
    """Returns an error without the list of what is supported."""
    return why.partition("; supported")[0]


def page(tried: Mapping[Case, Outcome], day: str) -> str:
    """Returns the page."""
    rows = [row(release.model, _of(release.model, tried), day) for release in RELEASES]
    facts = [
        [release.model, f"`{release.architecture}`", f"`{release.config['model_type']}`", release.source]
        for release in RELEASES
    ]
    return "\n".join([
        BEGIN, table(["release", "served as", "refused", "tried on"], rows), "",
        FACTS, table(["release", "class", "`model_type`", "source"], facts), "",
    ])  # fmt: skip


def _of(model: str, tried: Mapping[Case, Outcome]) -> dict[str, Outcome]:
    return {label(case): outcome for case, outcome in tried.items() if case[0] == model}


def read(text: str) -> dict[str, tuple[list[str], str]]:
    """Returns for each release on the page the names of the forms that are served, and what is refused."""
    lines: Iterable[str] = text.partition("| --- |")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {model: (served.split(", "), refused) for model, served, refused, _ in cells}
