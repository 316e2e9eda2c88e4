"""The store of a test: a file of SQLite, and once more a Postgres where one is installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import postgres
from tests.frontend.kept.harness import KeptStore, PostgresStore, SQLiteStore


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.PostgresServer]:
    if problem := postgres.missing():
        pytest.skip(problem)
    with postgres.postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KeptStore:
    if request.param == "sqlite":
        return SQLiteStore(tmp_path / "state" / "answers.db")
    server: postgres.PostgresServer = request.getfixturevalue("postgres_server")
    return PostgresStore(server.emptied())
