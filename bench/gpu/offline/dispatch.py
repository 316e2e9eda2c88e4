"""Runs operations on host tensors. For operations on the fake GPU's tensors, it computes only the result's shape."""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu.offline.machine import Machine

COMPOSITE = "CompositeImplicitAutograd"
# operations that launch nothing on a device, besides those that return views
NOTHING_LAUNCHED = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "detach"}
aten = torch.ops.aten


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the device's operations, and the host's seconds spent on faking them."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._depth = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because nothing is compiled here, and torch's wrapper that disables Dynamo would only cost time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        begun, before = time.thread_time(), self._machine.operations
        self._depth += 1
        try:
            return self._run(func, args, kwargs)
        finally:
            self._depth -= 1
            if not self._depth and (func.namespace == "prim" or self._machine.operations > before):
                self._machine.faked_s += time.thread_time() - begun

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        kwargs, machine = dict(kwargs or {}), self._machine
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if _composite(func):  # inference mode does not decompose this operation
            with self:
                return func.decompose(*args, **kwargs)
        pinned, wanted = kwargs.pop("pin_memory", False), kwargs.get("device")
        from_device = bool(_fakes((args, kwargs)))
        to_device = wanted is not None and torch.device(wanted).type == "cuda"
        if not from_device and not to_device:
            made = func(*args, **kwargs)
            return machine.pin(made) if pinned else made
        machine.operations += 1
        if _launches(func):
            machine.launched[func._schema.name] += 1
        if func in ASKED:
            machine.wait(f"{func} asks the device")
            return ASKED[func](args[0])
        if func is aten.copy_.default:
            return self._copy(args[0], args[1], len(args) > 2 and args[2])
        if func is aten._to_copy.default and not to_device and wanted is not None:
            host = torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            machine.to_host(host, False)
            return host
        if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):
            machine.to_device(args[0], kwargs.get("non_blocking", False))
            with self._fake:
                return torch.empty_strided(
                    args[0].shape, args[0].stride(), dtype=kwargs.get("dtype") or args[0].dtype, device=wanted
                )
        machine.uses(*_fakes((args, kwargs)))
        with self._fake:
            made = func(*args, **kwargs)
        machine.makes(*_fakes(made))
        return made

    def _copy(self, into: Tensor, source: Tensor, asynchronous: bool) -> Tensor:
        if not isinstance(into, FakeTensor):
            assert into.shape == source.shape
            self._machine.to_host(into, asynchronous)
            return into
        if not isinstance(source, FakeTensor):
            self._machine.to_device(source, asynchronous)
            assert source.expand(into.shape) is not None
            return into
        self._machine.uses(into, source)
        with self._fake:
            aten.copy_.default(into, source, asynchronous)
        return into


@cache
def _launches(func: Any) -> bool:
    return not func.is_view and func._schema.name.removeprefix("aten::") not in NOTHING_LAUNCHED


def _scalar(tensor: Tensor) -> object:
    return True if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0


ASKED: dict[Any, Callable[[Tensor], object]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: lambda tensor: True,
    aten.is_nonzero.default: lambda tensor: True,
}


@cache
def _composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE)


def _fakes(value: Any) -> list[FakeTensor]:
    found: list[FakeTensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[FakeTensor]) -> None:
    """Appends the fake tensors in `value` to `found`. Runs for every operation; nested generators would be slower."""
    if isinstance(value, FakeTensor):
        found.append(value)
    elif isinstance(value, dict):
        for one in value.values():
            _collect(one, found)
    elif isinstance(value, tuple | list):
        for one in value:
            _collect(one, found)
