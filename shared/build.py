"""Says which version of Sluice this is."""

import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = "0.1.0"  # pyproject.toml reads it from here


def version(package: str = "") -> str:
    """Returns the version of Sluice, or of another installed distribution; "unknown" without one."""
    try:
        return metadata.version(package) if package else VERSION
    except metadata.PackageNotFoundError:
        return "unknown"


def commit(root: Path = ROOT) -> str:
    """Returns the commit of the git checkout, or the commit that the image was built from; empty if unknown."""
    if (file := root / "shared" / "commit.txt").is_file():
        return file.read_text().strip()
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
