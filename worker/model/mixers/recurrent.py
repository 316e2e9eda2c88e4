"""Helpers of the mixers with a recurrent state: they check sizes, and make small weights."""

from collections.abc import Callable, Sequence

from torch import Tensor

from worker.kernels.cpu.limits import MAX_TAPS
from worker.model.checkpoint.checkpoint import UnsupportedModel
from worker.model.mixers.kinds import Config


def positive_sizes(config: Config, names: Sequence[str], possible: Callable[[list[int]], bool]) -> list[int]:
    """Returns the settings `names`. Raises UnsupportedModel unless all are positive and possible(sizes) is true."""
    sizes = [int(config[name]) for name in names]
    if min(sizes) < 1 or not possible(sizes):
        sizes_text = ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
        raise UnsupportedModel(f"the config's sizes of recurrent layers are impossible: {sizes_text}")
    return sizes


def check_taps(taps: int, name: str) -> None:
    """Raises UnsupportedModel if a convolution has more taps than the kernels support. name: the name of the setting"""
    if not 1 <= taps <= MAX_TAPS:
        raise UnsupportedModel(f"{name} {taps} is not supported; supported are numbers from 1 to {MAX_TAPS}")


def taps_first(kernels: Tensor) -> Tensor:
    """Returns the weights of a convolution as [taps, channels]. kernels: the checkpoint's tensor [channels, 1, taps]"""
    return kernels[:, 0].T.contiguous()


def decay(log: Tensor) -> Tensor:
    return -log.exp()
