"""`python -m deploy.generate.release` writes version and registry into every file that states them."""

import shutil
from pathlib import Path

import pytest
import yaml

from deploy.generate import release
from deploy.generate.release import CHART
from shared.build import VERSION


def test_chart_has_the_version_of_the_code() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == VERSION


def test_version_and_registry_reach_chart_and_compose_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CHART, tmp_path / "helm/sluice")
    shutil.copytree(CHART.parents[1] / "docker", tmp_path / "docker")
    monkeypatch.setattr(release, "CHART", tmp_path / "helm/sluice")
    monkeypatch.setattr(release, "DEPLOY", tmp_path)
    for registry in ("registry.example.com/a", ""):
        release.name_images("7.8.9", registry)
        assert yaml.safe_load((tmp_path / "helm/sluice/Chart.yaml").read_text())["appVersion"] == "7.8.9"
        assert yaml.safe_load((tmp_path / "helm/sluice/values.yaml").read_text())["image"]["registry"] == registry
        services = yaml.safe_load((tmp_path / "docker/compose.yml").read_text())["services"]
        prefix = f"{registry}/" if registry else ""
        assert services["worker"]["image"] == f"{prefix}sluice-worker:7.8.9"
        assert services["frontend-2"]["image"] == f"{prefix}sluice-frontend:7.8.9"
