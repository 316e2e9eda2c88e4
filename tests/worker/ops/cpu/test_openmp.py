"""OpenMP threads spin only briefly while they wait, unless the operator has set something else."""

import os

import pytest

from worker.ops.openmp import spin_briefly


def test_spin_briefly_sets_a_short_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    spin_briefly()
    assert 0 < int(os.environ["GOMP_SPINCOUNT"]) <= 10_000


def test_spin_briefly_keeps_the_operator_s_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
