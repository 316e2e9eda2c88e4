"""Servers of tiny random checkpoints that several modules share, because each start takes seconds."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anthropic
import openai
import pytest

from tests.checkpoints import Checkpoints
from tests.e2e import families
from tests.e2e.server import Server, serving


@dataclass(frozen=True)
class Served:
    folder: Path
    server: Server


@pytest.fixture(scope="session")
def served(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server for a family. families.py makes families that reason and call tools, checkpoints.py makes all others."""
    make, folder = getattr(families, request.param, None), tmp_path_factory.mktemp("family")
    model = make(folder / "model") if make else checkpoints(request.param)
    with serving(model, folder / "log", "--dtype", "float32", "--prefill-chunk-size", "48") as server:
        yield Served(model, server)


@pytest.fixture
def server(served: Served) -> Server:
    return served.server


@pytest.fixture
def chat(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        yield sdk
