"""Source text of user-defined parts, so that editing a part makes it a new run."""

import contextlib
import functools
import hashlib
import inspect
from types import CodeType, FunctionType
from typing import Any

import numpy as np

PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)


def source_of(*things: Any) -> str:
    """Source text of functions and classes, and of everything they use from their own modules.

    Globals and closure variables are followed: functions and classes of the same module contribute their
    source, plain values and containers of them their values. Everything else (imported packages) is ignored.
    The text is the same in every process and for every version of Python.
    """
    texts: list[str] = []
    seen: set[int] = set()
    for thing in things:
        _collect("", thing, None, texts, seen)
    return "\n".join(texts)


def _collect(name: str, thing: Any, home: str | None, texts: list[str], seen: set[int]) -> None:
    """Appends the text of `thing`, found under `name` in the module `home`, and of what it uses."""
    if (value := _value(thing)) is not None:
        texts.append(f"{name} = {value}")
    elif isinstance(thing, functools.partial):
        for inner in (thing.func, thing.args, thing.keywords):
            _collect(name, inner, home, texts, seen)
    elif callable(thing):
        thing = inspect.unwrap(thing)
        if not isinstance(thing, type | FunctionType) or id(thing) in seen:
            return
        if home is None or thing.__module__ == home:
            seen.add(id(thing))
            texts.append(_text(thing))
            for function in [thing] if isinstance(thing, FunctionType) else _methods(thing):
                for key, used in _used(function).items():
                    _collect(key, used, thing.__module__, texts, seen)


def _value(thing: Any) -> str | None:
    """The text of a plain value or a container of plain values; None for anything else."""
    if isinstance(thing, PLAIN):
        return repr(thing)
    if hasattr(thing, "__array__") and hasattr(thing, "dtype") and not isinstance(thing, type):
        array = np.asarray(thing)
        return f"array {array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
    if isinstance(thing, tuple | list):
        return f"[{', '.join(str(_value(v)) for v in thing)}]"
    if isinstance(thing, set | frozenset):
        return f"{{{', '.join(sorted(str(_value(v)) for v in thing))}}}"
    if isinstance(thing, dict):
        return f"{{{', '.join(sorted(f'{_value(k)}: {_value(v)}' for k, v in thing.items()))}}}"
    return None


def _used(function: FunctionType) -> dict[str, Any]:
    """The closure variables and the globals that a function uses, by name."""
    used = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            used[name] = cell.cell_contents
    known = function.__globals__
    return used | {name: known[name] for name in _names(function.__code__) if name in known}


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
