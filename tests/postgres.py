"""A Postgres of its own for tests, from the system's packages (Debian, Ubuntu: postgresql)."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from tests.patience import PATIENCE_S

USER, PASSWORD = "sluice", "s3cret/p@ss"
SETTINGS = {
    "listen_addresses": "", "fsync": "off", "shared_buffers": "16MB", "max_connections": "40", "max_wal_size": "64MB",
    "autovacuum": "off",
}  # fmt: skip


def programs() -> Path | None:
    """Returns the folder with the newest installed server's programs."""
    found = [*Path("/usr/lib/postgresql").glob("*/bin/postgres"), *Path("/usr").glob("pgsql-*/bin/postgres")]
    named = shutil.which("postgres")
    newest = sorted(found, key=lambda path: path.parent.parent.name.rjust(8))
    return newest[-1].parent if newest else Path(named).parent if named else None


def missing() -> str:
    """Says why there can be no server; empty if there can."""
    if programs() is None:
        return "there is no Postgres (Debian, Ubuntu: apt install postgresql)"
    return "" if find_spec("psycopg") else "psycopg is not installed (sluice-llm[postgres])"


class PostgresServer:
    """A server that listens on a socket in its folder alone. It does not run as root."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        found = programs()
        assert found is not None
        self._programs = found
        self._as: list[str] = []
        if os.geteuid() == 0:
            names = {one.pw_name for one in pwd.getpwall()}
            user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
            os.chown(folder, user.pw_uid, user.pw_gid)
            self._as = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        self.process: subprocess.Popen[bytes] | None = None
        word = folder / "password"
        word.write_text(PASSWORD)
        word.chmod(0o644)
        how = ["-U", USER, "-A", "scram-sha-256", f"--pwfile={word}", "-E", "UTF8", "--no-locale", "--no-sync"]
        self._run("initdb", "-D", str(self.data), *how)

    def _run(self, program: str, *args: str) -> None:
        subprocess.run(
            [*self._as, str(self._programs / program), *args], check=True, capture_output=True, cwd=self.folder
        )  # fmt: skip

    def start(self) -> None:
        flags = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
        place = ["-D", str(self.data), "-k", str(self.folder)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self._as, str(self._programs / "postgres"), *place, *flags], stderr=log, cwd=self.folder
            )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with suppress(subprocess.CalledProcessError):
                self._run("pg_isready", "-h", str(self.folder))
                return
            assert time.monotonic() < deadline and self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.05)

    def stop(self, how: str = "immediate") -> None:
        """how: `immediate` is as a crash, `fast` ends transactions, and syncs what was committed"""
        self._run("pg_ctl", "stop", "-D", str(self.data), "-m", how)
        assert self.process is not None
        self.process.wait(PATIENCE_S)

    def url(self, database: str, user: str = USER, password: str = PASSWORD) -> str:
        return f"postgresql://{user}:{quote(password, safe='')}@{quote(str(self.folder), safe='')}/{database}"

    def emptied(self) -> str:
        """Deletes the tables of the store before this one, and returns the URL of the database."""
        self.execute("DROP SCHEMA IF EXISTS sluice CASCADE")
        return self.url("postgres")

    def execute(self, *statements: str, database: str = "postgres") -> None:
        import psycopg  # it is optional

        with psycopg.connect(self.url(database), autocommit=True) as db:
            for one in statements:
                db.execute(one)  # type: ignore[call-overload]


@contextmanager
def postgres() -> Iterator[PostgresServer]:
    """Starts a server in a temporary folder, and ends it with all that it has."""
    with tempfile.TemporaryDirectory(prefix="sluice-pg-") as name:  # a short path: those of sockets are bounded
        server = PostgresServer(Path(name))
        server.start()
        try:
            yield server
        finally:
            if server.process is not None and server.process.poll() is None:
                server.stop()
