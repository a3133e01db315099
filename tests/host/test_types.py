"""Types of the main functions for type checkers: results as asked for, and parameters that are those that run."""

import ast
import inspect
from pathlib import Path
from types import ModuleType

from torch import Tensor

from flash_attn_cute import api, flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.distributed import public_functions as distributed_functions


def test_overloads_have_the_parameters_of_the_function() -> None:
    functions = {
        **dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func"), api),
        **dict.fromkeys(("context_parallel_attn_func", "context_parallel_attn_varlen_func"), distributed_functions),
    }
    for name, module in functions.items():
        body = ast.parse(Path(str(module.__file__)).read_text()).body
        *overloads, implementation = (x for x in body if isinstance(x, ast.FunctionDef) and x.name == name)
        if module is distributed_functions:  # whose functions have the same arguments, and types in one place
            (protocol,) = (x for x in body if isinstance(x, ast.ClassDef) and x.name == "_Attention")
            overloads = [x for x in protocol.body if isinstance(x, ast.FunctionDef)]
            assert [ast.unparse(x) for x in implementation.decorator_list] == ["_typed"]
        assert [ast.unparse(x.returns or x) for x in overloads] == [
            "Tensor",
            "tuple[Tensor, Tensor]",
            "tuple[Tensor, ...]",
            "Tensor | tuple[Tensor, ...]",
        ]
        positional, keywords = parameters(implementation)
        assert keywords.pop("return_lse") == keywords.pop("return_max_logits") == "bool"
        assert keywords == annotations(module, "Keywords")
        no, yes = "Literal[False]", "Literal[True]"
        asked = [(no, no), (yes, no), ("bool", yes), ("bool", "bool")]
        for overload, (lse, max_logits) in zip(overloads, asked, strict=True):
            assert parameters(overload) == (positional, {"return_lse": lse, "return_max_logits": max_logits})
            assert overload.args.kwarg is not None
            assert ast.unparse(overload.args.kwarg.annotation or overload) == "'Unpack[Keywords]'"
        returned = {"return_lse", "return_max_logits"}
        assert {*positional, *keywords, *returned} == {*inspect.signature(getattr(module, name)).parameters}


def parameters(function: ast.FunctionDef) -> tuple[dict[str, str], dict[str, str]]:
    """The annotations of positional parameters and of keyword-only ones."""
    positional, keywords = (
        {x.arg: ast.unparse(x.annotation) for x in parameters if x.annotation}  # but for self
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


# Calls that mypy, which checks this file, is to accept, and wrong ones that it is to refuse: it wants no idle comments.
def dense(q: Tensor, flag: bool) -> tuple[Tensor, Tensor, Tensor | tuple[Tensor, ...]]:
    out: Tensor = flash_attn_func(q, q, q)
    pair: tuple[Tensor, Tensor] = flash_attn_func(q, q, q, return_lse=True)
    wrong: Tensor = flash_attn_func(q, q, q, return_lse=True)  # type: ignore[assignment]
    del wrong
    out, lse, max_logits = flash_attn_func(q, q, q, return_lse=True, return_max_logits=True)
    return out, pair[1] + lse + max_logits.sum(), flash_attn_func(q, q, q, return_lse=flag)


def packed(q: Tensor, cu: Tensor, flag: bool) -> tuple[Tensor, Tensor, Tensor | tuple[Tensor, ...]]:
    out: Tensor = flash_attn_varlen_func(q, q, q, cu, cu, 5, 5)
    pair: tuple[Tensor, Tensor] = flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, return_lse=True)
    wrong: Tensor = flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, return_lse=True)  # type: ignore[assignment]
    del wrong
    return out, pair[1], flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, return_lse=flag)
