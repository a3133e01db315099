"""Tensors that a ``mask_mod`` looks up, so that writes to them are noticed."""

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors_of(function: Any) -> Iterator[Tensor]:
    """The tensors that a function can name: captured, defaults, globals of its module, attributes of an object."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            waiting += x
        elif isinstance(x, dict):
            waiting += x.values()
        elif isinstance(x, functools.partial):
            waiting += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, types.MethodType):
            waiting += [x.__func__, *_attributes(x.__self__, x.__func__)]
        elif isinstance(x, types.FunctionType):
            waiting += _named_by(x)
        else:
            for name in ("__call__", "forward"):  # of modules, too
                if isinstance(call := getattr(type(x), name, None), types.FunctionType):
                    waiting += [call, *_attributes(x, call)]


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    for name in function.__code__.co_names:
        x = function.__globals__.get(name)
        if isinstance(x, Tensor) or (isinstance(x, types.FunctionType) and x.__module__ == function.__module__):
            yield x
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            x = cell.cell_contents
        except ValueError:  # bound later
            continue
        yield x
        yield from _attributes(x, function)


def _attributes(x: Any, function: Any) -> Iterator[Any]:
    """Attributes of an object that a function names, buffers of modules among them."""
    own = getattr(x, "__dict__", {})
    for name in getattr(getattr(function, "__code__", None), "co_names", ()):
        for attributes in (own, own.get("_buffers"), own.get("_parameters")):
            if isinstance(attributes, dict) and isinstance(attributes.get(name), (Tensor, types.FunctionType)):
                yield attributes[name]
