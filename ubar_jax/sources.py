"""Source text of user-defined parts, so that editing a part makes it a new run."""

import ast
import contextlib
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)


def source_of(*things: Any) -> str:
    """Source text of functions and classes, and of everything they name from their own modules.

    Names in the text (decorators, defaults, base classes, class bodies and nested functions included) and
    closure variables are followed: functions and classes of the same module contribute their text, other
    values their contents. What comes from imported modules is ignored. The text does not depend on the
    process or on the version of Python, except for functions without a source file.
    """
    texts: list[str] = []
    seen: dict[int, Any] = {}  # holds on to the objects, so that no id is used twice
    for thing in things:
        _collect("", thing, None, texts, seen)
    return "\n".join(texts)


def _collect(name: str, thing: Any, home: str | None, texts: list[str], seen: dict[int, Any]) -> None:
    """Appends the text of `thing`, found under `name` in the module `home`, and of what it names."""
    if isinstance(thing, PLAIN):
        texts.append(f"{name} = {thing!r}")
        return
    if id(thing) in seen or isinstance(thing, ModuleType):
        return
    seen[id(thing)] = thing
    if _is_array(thing):
        array = np.asarray(thing)
        texts.append(f"{name} = {array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}")
    elif isinstance(thing, type | FunctionType):
        thing = inspect.unwrap(thing)
        if home is None or thing.__module__ == home:
            texts.append(_text(thing))
            for key, used in (*_named_by(thing), *_inside(thing)):
                _collect(key, used, thing.__module__, texts, seen)
    else:
        for key, member in _members(thing, home):
            _collect(f"{name}.{key}", member, home, texts, seen)


def _is_array(thing: Any) -> bool:
    return hasattr(thing, "__array__") and hasattr(thing, "dtype") and not isinstance(thing, type)


def _members(thing: Any, home: str | None) -> Iterator[tuple[str, Any]]:
    """What a container, a partial or an instance of a class of the module `home` consists of."""
    if isinstance(thing, functools.partial):
        yield from {"func": thing.func, "args": thing.args, "keywords": thing.keywords}.items()
    elif isinstance(thing, dict):
        named = {repr(key): value for key, value in thing.items() if isinstance(key, PLAIN)}
        yield from sorted(named.items(), key=lambda item: item[0])
    elif isinstance(thing, tuple | list):
        yield from ((str(i), member) for i, member in enumerate(thing))
    elif isinstance(thing, set | frozenset):
        yield "set", " ".join(sorted(repr(member) for member in thing if isinstance(member, PLAIN)))
    elif type(thing).__module__ in (home, "types"):
        yield "type", type(thing)
        yield from sorted(getattr(thing, "__dict__", {}).items(), key=lambda item: item[0])


def _text(thing: Any) -> str:
    try:
        return _source(thing)
    except (OSError, TypeError):  # defined in an interpreter: no source file
        return f"{thing.__qualname__} {_bytecode(getattr(thing, '__code__', None))}"


def _source(thing: Any) -> str:
    code = getattr(thing, "__code__", None)
    if code is not None and code.co_filename == "<string>":
        raise OSError("no source file")  # Python 3.13 would give the text of `python -c`, whatever it is
    return inspect.getsource(thing)


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    """The bases and members of a class whose own text is not found: one written in a cell of a notebook."""
    if isinstance(thing, type) and not _has_text(thing):
        yield from ((base.__name__, base) for base in thing.__bases__)
        for key, member in sorted(vars(thing).items()):
            member = getattr(member, "__func__", member)  # of a static or class method
            if isinstance(member, (FunctionType, *PLAIN)) and key not in ("__module__", "__firstlineno__"):
                yield key, member


def _has_text(thing: Any) -> bool:
    try:
        return bool(_source(thing))
    except (OSError, TypeError):
        return False


def _bytecode(code: CodeType | None) -> str:
    if code is None:
        return ""
    constants = [_bytecode(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code!r} {code.co_names} {constants}"


def _named_by(thing: Any) -> Iterator[tuple[str, Any]]:
    """The closure variables and the globals that a function or class names, sorted by name."""
    found = {}
    if _is_function(thing):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                found[name] = cell.cell_contents
    known = thing.__globals__ if _is_function(thing) else vars(sys.modules.get(thing.__module__, object))
    found |= {name: known[name] for name in _names(thing) - found.keys() if name in known}
    yield from sorted(found.items(), key=lambda item: item[0])


def _is_function(thing: Any) -> bool:
    return isinstance(thing, FunctionType)


def _names(thing: Any) -> set[str]:
    """The names in the text of a function or class."""
    try:
        tree = ast.parse(textwrap.dedent(_source(thing)))
    except (OSError, TypeError, SyntaxError):  # no source file, or a lambda amid an expression
        return _code_names(thing.__code__) if _is_function(thing) else set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _code_names(code: CodeType) -> set[str]:
    inner = [_code_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)
