"""Puts the packages of a wheel in the folder sluice_server, where their names collide with no other project's.

sluice.py finds them there. pyproject.toml has everything else. With SLUICE_WHEEL_KERNELS=1, the wheel has the C library
for every processor of this architecture inside, and its name has the platform; without, it is the same for all.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDERS = ("frontend", "worker", "shared", "deploy", "bench")
HOME = "sluice_server"
WITH_KERNELS = os.environ.get("SLUICE_WHEEL_KERNELS") == "1"


class BuildWithKernels(build_py):
    """Compiles the C library in the folder that becomes the wheel. The checkout stays as it is."""

    def run(self) -> None:
        super().run()
        home = Path(self.build_lib) / HOME
        environment = os.environ | {"PYTHONPATH": str(home.absolute()), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-P", "-m", "worker.ops.native_build", "--all"]
        subprocess.run(command, cwd=home, env=environment, check=True)
        libraries = home / "worker" / "ops" / "csrc"
        if not list(libraries.glob("libsluice-*.so")):
            raise SystemExit("the C library was not compiled; the reason is above")
        for left in libraries.glob(".build-*"):
            left.unlink()


class PlatformWheel(bdist_wheel):
    """Names the platform, but no version of Python: the library is loaded with ctypes."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    packages=[f"{HOME}.{name}" for name in find_packages() if name.split(".")[0] in FOLDERS],
    package_dir={f"{HOME}.{folder}": folder for folder in FOLDERS},
    **(
        {"cmdclass": {"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, "distclass": WithLibrary}
        if WITH_KERNELS
        else {}
    ),
)
