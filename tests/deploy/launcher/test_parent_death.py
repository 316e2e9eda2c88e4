"""Child processes of a killed launcher end, and the launcher's port is free again."""

from pathlib import Path

from deploy.launcher.run_dir import is_taken
from tests.deploy.launcher.launcher import launcher, until_dead
from tests.patience import PATIENCE_S


def test_children_of_a_killed_launcher_die_and_free_the_port(tmp_path: Path) -> None:
    with launcher(tmp_path, "--frontends=2") as run:
        pids = run.pids(3)
        [port] = {int(port) for port in run.until(r"ready at http://127.0.0.1:(\d+)")}
        run.process.kill()
        until_dead(pids)
        run.process.wait(PATIENCE_S)
        assert not is_taken("127.0.0.1", port)
