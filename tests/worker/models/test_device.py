"""The choice of the device and its errors, with fake answers of PyTorch."""

import logging
from typing import Any

import pytest
import torch

from shared.config.declaration import ConfigError
from shared.machine import visible_gpus
from worker.device import check_format, check_kernels, pick_device

NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    "http://www.nvidia.com/Download/index.aspx"
)
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
ODD_DRIVER = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error 803: system has unsupported display driver / cuda driver combination"
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fakes a GPU. said: error at the start of CUDA; computes: error of a computation; "" for no error"""

    def set(
        said: str = "", *, computes: str = "", built: str | None = "13.0", capability: tuple[int, int] = (9, 0)
    ) -> None:
        def fail(words: str) -> None:
            if words:
                raise RuntimeError(words)

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: not said and built is not None)
        monkeypatch.setattr(torch.cuda, "init", lambda: fail(said))
        monkeypatch.setattr("worker.device._try_cuda", lambda: fail(computes))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")

    return set


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (NO_DRIVER, "--device cuda: Found no NVIDIA driver on your system"),
        (OLD_DRIVER, "--device cuda: The NVIDIA driver on your system is too old (found version 11040)"),
        (ODD_DRIVER, "--device cuda: Error 803: system has unsupported display driver / cuda driver combination"),
        ("No CUDA GPUs are available", "--device cuda: No CUDA GPUs are available"),
    ],
)
def test_missing_gpu_reason_is_one_sentence(machine: Any, said: str, words: str) -> None:
    machine(said)
    with pytest.raises(ConfigError) as caught:
        pick_device("cuda")
    assert str(caught.value) == words
    assert pick_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_unusable_gpu_raises_instead_of_using_the_cpu(machine: Any, name: str) -> None:
    machine(
        computes="CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported. For debugging ..."
    )
    with pytest.raises(ConfigError) as caught:
        pick_device(name)
    assert str(caught.value) == f"--device {name}: CUDA error: out of memory"


def test_torch_without_cuda_is_named(machine: Any) -> None:
    machine("Torch not compiled with CUDA enabled", built=None)
    with pytest.raises(ConfigError, match="--device cuda: this PyTorch was built without CUDA"):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("visible", "left"), [("", []), ("-1", []), ("-1,0", []), ("1,-1,2", ["1"]), ("0, 2", ["0", "2"])]
)
def test_cuda_visible_devices_hiding_all_gpus_is_named(
    machine: Any, monkeypatch: pytest.MonkeyPatch, visible: str, left: list[str]
) -> None:
    machine("No CUDA GPUs are available")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == left
    words = "No CUDA GPUs" if left else f"CUDA_VISIBLE_DEVICES is '{visible}', which leaves no GPU"
    with pytest.raises(ConfigError, match=f"--device cuda: {words}"):
        pick_device("cuda")


def test_auto_uses_a_gpu_and_cpu_does_not(machine: Any) -> None:
    machine()
    assert [pick_device(name).type for name in ("cuda", "auto", "cpu")] == ["cuda", "cuda", "cpu"]


def test_auto_logs_an_unusable_gpu(
    machine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(OLD_DRIVER)
    with caplog.at_level(logging.WARNING, "sluice.load"):
        pick_device("auto")
        said = len(caplog.messages)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        pick_device("auto")
    assert said == 0 or visible_gpus(), "nothing is said where there is none"
    assert "too old (found version 11040)" in caplog.messages[-1]


def test_fp8_cache_needs_a_newer_gpu(machine: Any) -> None:
    machine(capability=(8, 0))
    with pytest.raises(ConfigError, match=r"8\.0, and float8_e4m3fn needs 8\.9: choose --kv-cache-dtype auto"):
        check_format(torch.device("cuda"), torch.float8_e4m3fn)
    machine(capability=(8, 9))
    check_format(torch.device("cuda"), torch.float8_e4m3fn)


def test_old_gpu_is_rejected_unless_plain_pytorch_computes(machine: Any) -> None:
    gpu = torch.device("cuda")
    machine(capability=(7, 5))
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5.* need 8\.0: choose --device cpu, or"):
        check_kernels(gpu, "auto")
    check_kernels(gpu, "torch")
    check_kernels(torch.device("cpu"), "auto")
    machine(capability=(8, 0))
    check_kernels(gpu, "triton")


def test_old_gpu_is_rejected_for_bfloat16_only(machine: Any) -> None:
    gpu = torch.device("cuda")
    machine(capability=(7, 5))
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5.* --dtype float16"):
        check_format(gpu, torch.bfloat16)
    check_format(gpu, torch.float16)
    check_format(torch.device("cpu"), torch.bfloat16)
    machine(capability=(8, 0))
    check_format(gpu, torch.bfloat16)
