"""deploy/generate/release.py: the committed manifests equal the rendered chart."""

import shutil
from pathlib import Path

import pytest

from deploy.generate.release import CHART, FILES, FOLDER, render
from tests.deploy.kubernetes_programs import program


@pytest.fixture(scope="module", autouse=True)
def needs_helm() -> None:
    program("helm")


@pytest.mark.parametrize("name", FILES)
def test_manifests_are_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == render(FILES[name]), "python -m deploy.generate.release writes it"


def test_rendering_of_another_chart_shows_its_version(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "sluice")
    chart = tmp_path / "sluice/Chart.yaml"
    chart.write_text(chart.read_text().replace("appVersion: 0.1.0", "appVersion: 7.8.9"))
    assert "image: sluice-worker:7.8.9\n" in render(FILES["worker.yaml"], tmp_path / "sluice")
