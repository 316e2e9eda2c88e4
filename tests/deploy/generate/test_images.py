"""Tests of deploy/generate/release.py."""

import re

import yaml

from deploy.generate.release import DEPLOY, DOCKERFILE, IMAGES
from tests.deploy.starts import ROOT, stages


def test_references_have_registry_version_and_variant() -> None:
    assert [image.reference("1.2.3", "registry.example.com/team/") for image in IMAGES] == [
        "registry.example.com/team/sluice-frontend:1.2.3",
        "registry.example.com/team/sluice-worker:1.2.3",
        "registry.example.com/team/sluice-worker:1.2.3-cpu",
    ]
    assert IMAGES[0].reference("1.2.3") == "sluice-frontend:1.2.3"


def test_builds_name_stages_and_arguments_that_the_dockerfile_has() -> None:
    text = (ROOT / DOCKERFILE).read_text()
    for image in IMAGES:
        words = image.build("1", "", "0123456789ab", "https://index.example.com")
        assert words[words.index("--target") + 1] in stages()
        given = [word.partition("=")[0] for word in words if "=" in word]
        assert given[0] == "COMMIT" and ("PIP_EXTRA_INDEX_URL" in given) == image.torch_index
        assert all(re.search(rf"^ARG {name}$", text, re.MULTILINE) for name in given)
    assert not [word for word in IMAGES[0].build("1", "", "", "") if "=" in word]


def test_compose_file_has_the_names_that_a_release_gives() -> None:
    compose = yaml.safe_load((DEPLOY / "docker/compose.yml").read_text())
    version = re.search(r"^appVersion: (\S+)$", (DEPLOY / "helm/sluice/Chart.yaml").read_text(), re.MULTILINE)
    built = {one["image"] for one in compose["services"].values() if "build" in one}
    assert version and built == {image.reference(version[1]) for image in IMAGES if not image.variant}
