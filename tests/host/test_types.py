"""Types of the main functions for type checkers: results by return_lse, and parameters that are those that run."""

import ast
import inspect
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from flash_attn_cute import api, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.distributed import public_functions as distributed_functions


def test_overloads_have_the_parameters_of_the_function() -> None:
    functions = {
        **dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func"), api),
        **dict.fromkeys(("context_parallel_attn_func", "context_parallel_attn_varlen_func"), distributed_functions),
    }
    for name, module in functions.items():
        tree = ast.parse(Path(str(module.__file__)).read_text())
        *overloads, implementation = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name)
        assert [ast.unparse(x.returns or x) for x in overloads] == [
            "Tensor",
            "tuple[Tensor, Tensor]",
            "Tensor | tuple[Tensor, Tensor]",
        ]
        positional, keywords = parameters(implementation)
        assert keywords.pop("return_lse") == "bool"
        assert keywords == annotations(module, "Keywords")
        returns = ["Literal[False]", "Literal[True]", "bool"]
        for overload, return_lse in zip(overloads, returns, strict=True):
            assert parameters(overload) == (positional, {"return_lse": return_lse})
            assert overload.args.kwarg is not None
            assert ast.unparse(overload.args.kwarg.annotation or overload) == "'Unpack[Keywords]'"
        assert {*positional, *keywords, "return_lse"} == {*inspect.signature(getattr(module, name)).parameters}


def parameters(function: ast.FunctionDef) -> tuple[dict[str, str], dict[str, str]]:
    """The annotations of positional parameters and of keyword-only ones."""
    positional, keywords = (
        {x.arg: ast.unparse(x.annotation) for x in parameters if x.annotation}
        for parameters in (function.args.args, function.args.kwonlyargs)
    )
    return positional, keywords


def annotations(module: ModuleType, name: str) -> dict[str, str]:
    """The annotations of a class's fields as its module spells them, those of its bases included."""
    (cls,) = (x for x in ast.parse(Path(str(module.__file__)).read_text()).body if getattr(x, "name", "") == name)
    assert isinstance(cls, ast.ClassDef)
    own = {ast.unparse(x.target): ast.unparse(x.annotation) for x in cls.body if isinstance(x, ast.AnnAssign)}
    bases = [ast.unparse(x) for x in cls.bases]
    return (annotations(api, "SharedKeywords") if "SharedKeywords" in bases else {}) | own


@pytest.mark.slow
def test_types() -> None:
    """Calls that mypy is to accept; it checks this file."""

    def dense(q: Tensor, flag: bool) -> tuple[Tensor, Tensor, Tensor | tuple[Tensor, Tensor]]:
        out: Tensor = flash_attn_func(q, q, q)
        pair: tuple[Tensor, Tensor] = flash_attn_func(q, q, q, return_lse=True)
        wrong: Tensor = flash_attn_func(q, q, q, return_lse=True)  # type: ignore[assignment]
        del wrong
        return out, pair[1], flash_attn_func(q, q, q, return_lse=flag)

    def packed(q: Tensor, cu: Tensor, flag: bool) -> tuple[Tensor, Tensor, Tensor | tuple[Tensor, Tensor]]:
        out: Tensor = flash_attn_varlen_func(q, q, q, cu, cu, 5, 5)
        pair: tuple[Tensor, Tensor] = flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, return_lse=True)
        wrong: Tensor = flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, return_lse=True)  # type: ignore[assignment]
        del wrong
        return out, pair[1], flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, return_lse=flag)

    assert callable(dense)
    assert callable(packed)
