"""Says which version and commit of Sluice this is, and hashes what decides the bytes of answers."""

import dataclasses
import hashlib
import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

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


# The fingerprint: a short hash of everything that decides the bytes of an answer.
#
# A worker hashes what it computes with (worker/engine/numerics.py). A frontend adds how it makes prompts
# (frontend/model_context.py). Two servers with equal fingerprints give equal answers to equal requests.

DIGITS = 16  # hexadecimal digits of a fingerprint


def fingerprint_of(facts: Any) -> str:
    """Returns the fingerprint of `facts`, which may be dataclasses, containers, texts and numbers."""
    text = json.dumps(_described(facts), sort_keys=True, default=str)
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"


def _described(value: Any) -> Any:
    """Returns a value for JSON. Fields with their default value are left out, so that a new option does not change the
    fingerprint of servers that do not use the option."""
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
        return {field.name: _described(getattr(value, field.name)) for field in fields}
    if isinstance(value, dict):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    return value
