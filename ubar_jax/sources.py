"""Source text of user-defined parts, so that editing a part makes it a new run."""

import functools
import inspect
from types import CodeType, FunctionType
from typing import Any

import numpy as np

CONSTANTS = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, np.generic, np.ndarray)


def source_of(*things: Any) -> str:
    """Source text of functions and classes, and of everything they use from their own modules.

    Globals and closure variables are followed: functions and classes of the same module contribute their
    source, plain values their repr. Everything else (imported packages) is ignored.
    """
    texts: dict[int, str] = {}
    for thing in things:
        _collect(thing, texts)
    return "\n".join(filter(None, texts.values()))


def _collect(thing: Any, texts: dict[int, str], home: str | None = None) -> None:
    if isinstance(thing, functools.partial):
        for inner in (thing.func, thing.args, thing.keywords):
            _collect(inner, texts, home)
        return
    if isinstance(thing, CONSTANTS):
        texts[id(thing)] = repr(thing)
        return
    thing = inspect.unwrap(thing) if callable(thing) else thing
    if (
        not isinstance(thing, type | FunctionType)
        or id(thing) in texts
        or home not in (None, thing.__module__)
    ):
        return
    texts[id(thing)] = _text(thing)
    functions = [thing] if isinstance(thing, FunctionType) else _methods(thing)
    for function in functions:
        kept = [cell.cell_contents for cell in function.__closure__ or () if cell.cell_contents is not thing]
        used = [function.__globals__[n] for n in _names(function.__code__) if n in function.__globals__]
        for value in (*kept, *used):
            _collect(value, texts, thing.__module__)


def _text(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # defined in an interpreter: no source file
        code = getattr(thing, "__code__", None)
        return f"{thing.__qualname__} {code and (code.co_code, code.co_names)}"


def _methods(thing: type) -> list[FunctionType]:
    return [value for value in vars(thing).values() if isinstance(value, FunctionType)]


def _names(code: CodeType) -> list[str]:
    """The global names used by a function and its nested functions."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return sorted({*code.co_names, *inner})
