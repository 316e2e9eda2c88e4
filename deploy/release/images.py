"""Names and tags of the images, and how they are built. Chart, manifests and compose file repeat them."""

from dataclasses import dataclass

DOCKERFILE = "deploy/docker/Dockerfile"


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a release.

    target: stage of the Dockerfile
    variant: end of the tag
    torch_index: whether torch may come from an index of its own
    """

    name: str
    target: str
    variant: str = ""
    torch_index: bool = False

    def reference(self, version: str, registry: str = "") -> str:
        """Returns the whole name with its tag."""
        place = f"{registry.rstrip('/')}/" if registry else ""
        return f"{place}{self.name}:{version}{self.variant}"

    def build(self, version: str, registry: str, commit: str, torch_index: str) -> list[str]:
        """Returns the command that builds the image, in the root of a checkout."""
        arguments = [f"COMMIT={commit}"] if commit else []
        arguments += [f"PIP_EXTRA_INDEX_URL={torch_index}"] if torch_index and self.torch_index else []
        words = ["docker", "build", "-f", DOCKERFILE, "--target", self.target]
        words += [word for argument in arguments for word in ("--build-arg", argument)]
        return [*words, "-t", self.reference(version, registry), "."]


IMAGES = (
    Image("sluice-frontend", "frontend"),
    Image("sluice-worker", "worker"),  # torch from the package index serves NVIDIA GPUs, and CPUs too
    Image("sluice-worker", "worker", "-cpu", torch_index=True),  # without CUDA's libraries: a tenth of the size
)
