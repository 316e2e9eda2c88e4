"""What image processors of transformers call of torchvision, made with Pillow and torch.

torchvision's builds need a torch for CUDA, and some processors of transformers exist only with it. They use it for
resizing and normalization; everything else, such as how images are cut and which tokens they get, is their own code.
torchvision itself gives the same pixels up to one level of 255.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

import numpy as np
import torch
import transformers.image_processing_backends as backends
from PIL import Image
from torch import Tensor


def resize(image: Tensor, size: Sequence[int], interpolation: Image.Resampling, antialias: bool = True) -> Tensor:
    """Returns a resized image [3, height, width] uint8, or a batch of them."""
    if image.ndim == 4:
        return torch.stack([resize(one, size, interpolation, antialias) for one in image])
    height, width = size
    levels = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    return torch.from_numpy(np.array(levels.resize((width, height), interpolation))).permute(2, 0, 1).contiguous()


def normalize(image: Tensor, mean: Tensor, std: Tensor, inplace: bool = False) -> Tensor:
    mean, std = (torch.as_tensor(each, dtype=image.dtype).view(-1, 1, 1) for each in (mean, std))
    return (image - mean) / std


@contextmanager
def torchvision_stand_in() -> Iterator[None]:
    """While it lasts, processors that need torchvision can be imported. What was imported works afterwards, too."""
    names = (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    )
    modules = {name: ModuleType(name) for name in names}
    functional = modules[names[-1]]
    vars(functional).update(resize=resize, normalize=normalize, InterpolationMode=Image.Resampling)
    vars(modules["torchvision.transforms.v2"]).update(functional=functional)
    vars(backends).update(tvF=functional, pil_torch_interpolation_mapping={one: one for one in Image.Resampling})
    with patch.dict(sys.modules):
        sys.modules.update(modules)
        yield
