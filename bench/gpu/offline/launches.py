"""Catches Triton's launches: records their grids, and the compilations that they need by Triton's own rules."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from bench.gpu.offline.devices import H200, Device

MOST = (2**31 - 1, 65_535, 65_535)


@dataclass(frozen=True)
class Compilation:
    """A compilation that a launch needs: kernel, types of its arguments, constants and options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    capability: int = 90

    @property
    def key(self) -> str:
        names = self.kernel.arg_names
        fixed = {names[path[0]]: value for path, value in self.constants.items()}
        sixteens = [names[path[0]] for path, said in self.attributes.items() if said]
        kinds = {name: kind for name, kind in self.signature.items() if kind != "constexpr"}
        options = {name: self.options[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        return f"{self.kernel.__name__} {fixed} {kinds} by 16: {sixteens} {options}"

    def compiled(self) -> Any:
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=self.options)


@dataclass
class Launches:
    """What was launched on the fake GPU.

    compilations: in the order in which they are needed. closed: whether a graph capture runs, in which nothing may be
    compiled.
    """

    device: Device = H200
    compilations: list[Compilation] = field(default_factory=list)
    count: int = 0
    names: Counter[str] = field(default_factory=Counter)  # how often each kernel was launched
    faked_s: float = 0.0  # the host's seconds spent on faking kernels
    closed: bool = False
    find: Callable[[str], None] = print
    uses: Callable[..., None] = lambda *tensors: None

    @contextmanager
    def caught(self) -> Iterator[None]:
        target = GPUTarget("cuda", self.device.capability, 32)
        driver = SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device=None: 0, get_current_target=lambda: target,
            utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": self.device.shared}),
        )  # fmt: skip
        before = triton.runtime.driver._active
        triton.runtime.driver.set_active(driver)
        try:
            with patch.object(JITFunction, "_do_compile", self._compile()):
                yield
        finally:
            triton.runtime.driver._active = before
            for kernel in {one.kernel for one in self.compilations}:
                kernel.device_caches.clear()

    def _compile(self) -> Any:
        launches = self

        def compile(
            kernel: Any,
            key: Any,
            signature: Any,
            device: Any,
            constants: Any,
            options: Any,
            attributes: Any,
            warmup: Any,
        ) -> Any:
            made = Compilation(
                kernel,
                dict(signature),
                dict(constants),
                dict(attributes),
                dict(options.__dict__),
                launches.device.capability,
            )
            launches.compilations.append(made)
            if launches.closed:
                launches.find(f"{kernel.__name__} is compiled inside a recording")
            stand_in = launches._kernel(kernel)
            kernel.device_caches[0][0][key] = stand_in
            return stand_in

        return compile

    def _kernel(self, kernel: Any) -> Any:
        def run(x: int, y: int, z: int, *rest: Any) -> None:
            begun = time.thread_time()
            self.count += 1
            self.names[kernel.__name__] += 1
            grid, arguments = (x, y, z), rest[6:] if len(rest) > 6 else rest
            if not all(0 < size <= most for size, most in zip(grid, MOST, strict=True)):
                self.find(f"{kernel.__name__} has grid {grid}")
            for name, argument in zip(kernel.arg_names, arguments, strict=False):
                if isinstance(argument, FakeTensor):
                    self.uses(argument)
                elif isinstance(argument, Tensor):
                    self.find(f"{kernel.__name__}: {name} is on the host")
            self.faked_s += time.thread_time() - begun

        return SimpleNamespace(run=run, function=0, packed_metadata=(), launch_metadata=lambda *_: None)
