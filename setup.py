"""Puts the packages of a wheel in the folder sluice_server, where their names collide with no other project's.

sluice.py finds them there. pyproject.toml has everything else.
"""

from setuptools import find_packages, setup

FOLDERS = ("frontend", "worker", "shared", "deploy", "bench")
HOME = "sluice_server"

setup(
    packages=[f"{HOME}.{name}" for name in find_packages() if name.split(".")[0] in FOLDERS],
    package_dir={f"{HOME}.{folder}": folder for folder in FOLDERS},
)
