"""Chooses an operation's form: Triton on a GPU, the C library on a CPU, else plain PyTorch. Imports what is needed."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeVar, cast

from torch import Tensor

from worker.ops import native

Form = Callable[..., Any]
Result = TypeVar("Result")


def choosing(
    in_pytorch: Callable[..., Result], in_triton: str, in_c: Form, c_can: Callable[..., bool]
) -> Callable[..., Result]:
    """Returns an operation that calls one of these forms. The device of the first argument decides; on a CPU, `c_can`
    decides, too.

    in_triton: the name of a module and of a function in it, joined by a dot
    c_can: returns whether the C library can compute the operation for these positional arguments
    """
    on_gpu = cache(lambda: _imported(in_triton))

    def operation(x: Tensor, *args: Any, **named: Any) -> Result:
        if x.is_cuda:
            return cast(Result, on_gpu()(x, *args, **named))
        named.pop("options", None)
        form = in_c if c_can(x, *args) else in_pytorch
        return form(x, *args, **named)

    return operation


def of_some_models(place: str) -> Form:
    """Returns an operation that is imported at its first call, because only some models have it.

    place: the name of a module and of a function in it, joined by a dot
    """
    load = cache(lambda: _imported(place))

    def operation(*args: Any, **named: Any) -> Any:
        return load()(*args, **named)

    return operation


def _imported(place: str) -> Form:
    module, _, function = place.rpartition(".")
    form: Form = getattr(import_module(module), function)
    return form


# Functions that return whether the C library can compute an operation. They have the operation's arguments.


def has_dtype(x: Tensor, *_: Any) -> bool:
    return native.available(x.dtype)


def has_dtype_of_residual(x: Tensor, residual: Tensor, *_: Any) -> bool:
    return native.available(residual.dtype)
