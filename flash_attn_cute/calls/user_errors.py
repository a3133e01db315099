"""Errors in the words of a user's call: its names of arguments, and where to look for others."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def says_where_to_look(hint: str) -> Callable[[_Function], _Function]:
    """Makes a function end its TypeError with a hint where it is given arguments that it does not have."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except TypeError as error:
                if (
                    error.__traceback__ is None or error.__traceback__.tb_next is not None
                ):  # the function's own, from within
                    raise
                raise TypeError(f"{error}; {hint}") from None

        return call  # type: ignore[return-value]

    return decorate


def call(function: Callable[..., Any], names: Mapping[str, str], *args: Any, **options: Any) -> Any:
    """Calls a function whose errors name arguments as the caller's user does.

    ``names`` has the user's name of each argument that has another one there; the other arguments are the function's.
    """
    try:
        return function(*args, **options)
    except (TypeError, ValueError) as error:
        words = re.compile(rf"\b({'|'.join(names)})\b")
        error.args = tuple(words.sub(lambda word: names[word[0]], str(x)) for x in error.args)
        raise
