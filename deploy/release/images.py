"""Defines names and tags of the images, and how they are built. Chart, manifests and compose file repeat the names."""

from dataclasses import dataclass

DOCKERFILE = "deploy/docker/Dockerfile"


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a release.

    target: stage of the Dockerfile
    variant: suffix of the tag
    torch_index: whether torch may come from a separate package index
    """

    name: str
    target: str
    variant: str = ""
    torch_index: bool = False

    def reference(self, version: str, registry: str = "") -> str:
        """Returns the full name of the image with its tag."""
        place = f"{registry.rstrip('/')}/" if registry else ""
        return f"{place}{self.name}:{version}{self.variant}"

    def build(self, version: str, registry: str, commit: str, torch_index: str) -> list[str]:
        """Returns the command that builds the image; run it in the root of a checkout."""
        arguments = [f"COMMIT={commit}"] if commit else []
        arguments += [f"PIP_EXTRA_INDEX_URL={torch_index}"] if torch_index and self.torch_index else []
        words = ["docker", "build", "-f", DOCKERFILE, "--target", self.target]
        words += [word for argument in arguments for word in ("--build-arg", argument)]
        return [*words, "-t", self.reference(version, registry), "."]


IMAGES = (
    Image("sluice-frontend", "frontend"),
    Image("sluice-worker", "worker"),  # PyPI's torch supports NVIDIA GPUs and CPUs
    # an image without CUDA's libraries has a tenth of the size
    Image("sluice-worker", "worker", "-cpu", torch_index=True),
)
