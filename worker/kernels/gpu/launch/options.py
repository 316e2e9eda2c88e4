"""Ways to launch kernels that no hardware has proven yet. Each is off unless `--gpu-options` names it.

An option changes how kernels are launched and how they wait for one another, and never a result's bits. With an option
off, the compiled kernels are the same as if it did not exist. The worker compares every step of a test with and without
the options on its device, bit for bit, before it serves with them (worker/run/checks/option_check.py).

How a kernel gets them: `with_options` in worker/kernels/operations.py binds the record to the parameter `options` of
the operations, so the decoder calls these as before. An operation passes it on to its form in this folder, which reads
the fields. Options that need memory between programs find it in `arrivals`.
"""

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

ARRIVALS = 1 << 16  # counters in `arrivals`
PDL_CAPABILITY = (9, 0)  # the first compute capability with programmatic dependent launch
HOPPER = 9  # the major compute capability whose products of tiles run while their program does something else


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """The options of a launch. The fields that are bool have the names of `--gpu-options`.

    pdl: programmatic dependent launch: a kernel starts while the one before it still runs, and waits for its results
    (dependent_launch.py). Needs compute capability 9.0.
    weight_prefetch: with pdl, a product loads the first part of its weights into the L2 cache before it waits.
    last_combine: the last program of a sequence to finish its splits merges them, so attention is one kernel less.
    fused_norms: in a step of few rows, the last program of o or down adds the residual and computes the norm.
    prefetch_branch: while attention runs, a second branch of a CUDA graph loads the weights of o and the first part of
    the weights of gate_up into the L2 cache.
    library_products: products of many rows use the vendor's library where it gives the same bits.
    softmax_overlap: prefill attention computes the scores of the next block of keys during the softmax of this one
    (overlapped_attention.py). Needs Hopper's tensor cores: compute capability 9.x.
    """

    pdl: bool = False
    weight_prefetch: bool = False
    last_combine: bool = False
    fused_norms: bool = False
    prefetch_branch: bool = False
    library_products: bool = False
    softmax_overlap: bool = False
    # [ARRIVALS] int32: counts programs that have finished. All zeros whenever no kernel runs: the last program to count
    # sets its counter back, so that replays of a CUDA graph find zeros, too. Given if an option needs it.
    arrivals: Tensor | None = field(default=None, compare=False, repr=False)
    branch: "torch.cuda.Stream | None" = field(default=None, compare=False, repr=False)  # the stream of prefetch_branch

    @property
    def names(self) -> tuple[str, ...]:
        """The options that are on."""
        return tuple(name for name in GPU_OPTIONS if getattr(self, name))

    def on(self, device: torch.device) -> "GpuOptions":
        """Returns the options that the device supports, with the memory that they need there."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else PDL_CAPABILITY
        pdl = self.pdl and capability >= PDL_CAPABILITY
        overlap = self.softmax_overlap and capability[0] == HOPPER
        counts = self.last_combine or self.fused_norms
        arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=device) if counts else None
        # PyTorch captures on a stream of normal priority, so this is another one.
        branch = torch.cuda.Stream(device, priority=-1) if self.prefetch_branch and device.type == "cuda" else None
        prefetch = self.weight_prefetch and pdl
        return replace(
            self, pdl=pdl, weight_prefetch=prefetch, softmax_overlap=overlap, arrivals=arrivals, branch=branch
        )


GPU_OPTIONS = tuple(item.name for item in fields(GpuOptions) if item.type is bool)
NO_OPTIONS = GpuOptions()


def options_named(names: list[str]) -> GpuOptions:
    """Returns the options with these names, which must be some of GPU_OPTIONS."""
    return GpuOptions(**{name: name in names for name in GPU_OPTIONS})  # type: ignore[arg-type]
