"""Finds out whether the file of --store is another program's, before a server opens it as its store and changes it."""

import sqlite3
from contextlib import closing
from pathlib import Path

MAGIC = b"SQLite format 3\0"  # how every file of SQLite begins
OWN = {"answers", "pieces"}  # tables that every store has, since its first version
ADVICE = "; it was not changed; name another file, which is made if there is none"


def foreign_problem(store: str) -> str:
    """Says why a file is no store of a server's; empty if it is one, is damaged, or can become one. Changes nothing.

    store: as in --store
    """
    path = Path(store)
    if not path.is_file() or not path.stat().st_size:
        return ""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return f"the file is there and is no store of answers, nor any other database of SQLite{ADVICE}"
    tables = _tables(path)
    return f"the file is a database of another program: it has the table {min(tables)!r:.80}{ADVICE}" if tables else ""


def _tables(path: Path) -> set[str]:
    """Returns the names of a database's tables; none if it is a store of ours, or cannot be read."""
    log = path.with_name(f"{path.name}-wal")
    # Without a log, SQLite is told that the file does not change, so that it makes no files beside it.
    how = "mode=ro" if log.exists() and log.stat().st_size else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True)) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
        return set()
    return set() if tables >= OWN else tables
