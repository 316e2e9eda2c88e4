"""Ways to launch kernels, each named by `--gpu-options`. By default, only `library_products` is on, because an H200 has
shown that its bits are equal; the others are not proven on hardware yet.

An option changes how kernels are launched and how they wait for one another, but never a result's bits. If an option is
off, the compiled kernels are the same as if the option did not exist. Before the worker serves with options, it
computes test steps with and without them on its device, and compares all bits (worker/model_runner/check_bits.py).

`with_options` in worker/operations.py binds the record GpuOptions to the parameter `options` of the operations,
so the decoder calls the operations without options. An operation passes the record to its Triton form, which reads the
fields. `arrivals` is memory through which programs of a kernel communicate.
"""

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

ARRIVALS = 1 << 16  # how many counters `arrivals` has
PDL_CAPABILITY = (9, 0)  # the lowest compute capability with programmatic dependent launch
HOPPER = 9  # the major compute capability with asynchronous products of tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """The options of a launch. The fields that are bool have the names of `--gpu-options`.

    pdl: programmatic dependent launch: a kernel starts while the previous kernel still runs, and waits for its results
        (triton_common.py). Needs compute capability 9.0.
    weight_prefetch: with pdl, a matrix product loads the first part of its weights into the L2 cache before it waits
    last_combine: the last program that finishes a split of a decode merges the splits, so attention needs no second
        kernel
    fused_norms: in a step with few rows, the last program of the products o and down adds the residual and computes the
        norm
    prefetch_branch: while attention runs, a second branch of a CUDA graph loads the weights of o and the first part of
        the weights of gate_up into the L2 cache
    library_products: products of many rows use the vendor's library where it gives the same bits
    softmax_overlap: prefill attention computes the scores of the next block of keys during the softmax of the current
        block (attention/triton_prefill.py). Needs Hopper's tensor cores: compute capability 9.x.
    """

    pdl: bool = False
    weight_prefetch: bool = False
    last_combine: bool = False
    fused_norms: bool = False
    prefetch_branch: bool = False
    library_products: bool = False
    softmax_overlap: bool = False
    # [ARRIVALS] int32: counts finished programs; None if no option needs it. All counters are zero whenever no kernel
    # runs: the last program that counts sets its counter back, so that replays of a CUDA graph find zeros, too.
    arrivals: Tensor | None = field(default=None, compare=False, repr=False)
    # the stream on which prefetch_branch loads
    branch: "torch.cuda.Stream | None" = field(default=None, compare=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the options that are switched on."""
        return tuple(name for name in GPU_OPTIONS if getattr(self, name))

    def on(self, device: torch.device) -> "GpuOptions":
        """Returns these options for a device: without the options that the device does not support, and with the memory
        that options need on the device.
        """
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else PDL_CAPABILITY
        pdl = self.pdl and capability >= PDL_CAPABILITY
        overlap = self.softmax_overlap and capability[0] == HOPPER
        counts = self.last_combine or self.fused_norms
        arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=device) if counts else None
        # PyTorch captures CUDA graphs on a stream of normal priority, so that stream is never this one.
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
