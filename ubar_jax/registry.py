"""Registries of named parts with checked arguments, written as specs such as `ubar(rho=0.4)`."""

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import numbers
import sys
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from ubar_jax.sources import source_of

Traits = TypeVar("Traits")
Function = TypeVar("Function", bound=Callable[..., Any])

LARGEST_INTEGER = 2**31 - 1
TRACED = (
    "JAX traces the function with shapes but without values: write jnp.where(a, b, c) instead of `b if a "
    "else c`, multiply by a mask instead of indexing with it, and use jnp instead of np"
)
SMALLEST, LARGEST = 2.0**-126, 2.0**128 * (1 - 2.0**-24)  # positive normal float32


class ConfigError(ValueError):
    """An invalid setting; the message says what is wrong, what is allowed and how to fix it."""

    def _render_traceback_(self) -> list[str]:
        """In a notebook: the message alone."""
        return [f"{type(self).__name__}: {self}"]


class PartError(RuntimeError):
    """A user's part failed, or returned the wrong thing; the message names the part and the line.

    `__cause__` is the error that the part raised, with its traceback.
    """

    _render_traceback_ = ConfigError._render_traceback_


@dataclass(frozen=True)
class Number:
    """The range of an argument, given in its annotation; `words` are additional allowed values.

    Integers must also fit into int32, other numbers into float32 without overflow or underflow.
    """

    low: float = float("-inf")
    high: float = float("inf")
    open_low: bool = False
    open_high: bool = False
    integer: bool = False
    words: tuple[Any, ...] = ()

    def __str__(self) -> str:
        kind = "an integer" if self.integer else "a number"
        if self.low == float("-inf") and self.high == float("inf"):
            text = kind
        elif self.high == float("inf"):
            text = f"{kind} {'>' if self.open_low else '>='} {self.low:g}"
        else:
            left, right = "[("[self.open_low], "])"[self.open_high]
            text = f"{kind} in {left}{self.low:g}, {self.high:g}{right}"
        return " or ".join([text, *map(repr, self.words)])

    def limits(self, value: Any) -> str:
        """The limits of the number format as a message suffix, or "" if `value` is within them."""
        if (
            isinstance(value, bool)
            or not isinstance(value, numbers.Real)
            or value != value
            or self._fits(value)
        ):
            return ""
        return (
            f" (at most {LARGEST_INTEGER})"
            if self.integer
            else f" (0, or from {SMALLEST:.1e} to {LARGEST:.1e})"
        )

    def _fits(self, value: Any) -> bool:
        if self.integer:
            return abs(value) <= LARGEST_INTEGER
        return value == 0 or SMALLEST <= abs(value) <= LARGEST

    def accepts(self, value: Any) -> bool:
        if any(value is word or (isinstance(word, str) and value == word) for word in self.words):
            return True
        kind: Any = numbers.Integral if self.integer else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind) or value != value or not self._fits(value):
            return False
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def clean(self, value: Any) -> Any:
        """Convert to plain int or float, so that 1, 1.0 and np.float32(1) are the same setting."""
        if not isinstance(value, numbers.Real):
            return value
        kind: type = int if self.integer else float
        return kind(value)


@dataclass(frozen=True)
class Choice:
    """The allowed words or literals of an argument."""

    options: tuple[Any, ...]

    def __str__(self) -> str:
        return " or ".join(map(repr, self.options))

    def limits(self, value: Any) -> str:
        return ""

    def accepts(self, value: Any) -> bool:
        return any(value == option and type(value) is type(option) for option in self.options)

    def clean(self, value: Any) -> Any:
        return value


LATER = object()  # annotation of an argument that was added to a part later: at its default a spec does not
# show it, so that old runs keep their digests


@dataclass(frozen=True)
class Argument:
    """One argument of a part that the user may give."""

    name: str
    default: Any  # inspect.Parameter.empty if required
    allowed: Number | Choice | None  # allowed values, None if unrestricted
    is_text: bool
    later: bool = False  # see LATER

    @classmethod
    def of(cls, parameter: inspect.Parameter) -> "Argument":
        """From a parameter annotated as Annotated[type, Number(...)] or Annotated[type, Choice(...)]."""
        annotation = parameter.annotation
        notes = getattr(annotation, "__metadata__", (annotation,))
        allowed = next((note for note in notes if isinstance(note, Number | Choice)), None)
        return cls(parameter.name, parameter.default, allowed, annotation is str, LATER in notes)

    def __str__(self) -> str:
        return f"{self.name}={'...' if self.default is inspect.Parameter.empty else repr(self.default)}"


@dataclass(frozen=True)
class NoTraits:
    """For kinds of parts without traits."""


@dataclass(frozen=True)
class Part(Generic[Traits]):
    """A registered function with its arguments and its traits (what the simulator must know about it)."""

    name: str
    function: Callable
    parameters: dict[str, Argument]
    traits: Traits
    kind: str = "part"
    contract: str = ""  # what a part of this kind takes and returns, as a sentence

    @property
    def description(self) -> str:
        return inspect.getdoc(self.function) or ""

    @property
    def built_in(self) -> bool:
        return (self.function.__module__ or "").startswith("ubar_jax.")

    @functools.cached_property
    def source(self) -> str:
        """Source text of a user's part and of what it uses; read once because the file may change later."""
        return source_of(self.function, *filter(callable, vars(self.traits).values()))

    def wrong(self, what: str) -> PartError:
        """The error for a part that does not do what it must."""
        return PartError(f"{self.kind} {self.name!r} {what}. {self.contract}".rstrip())

    def failed(self, error: Exception) -> PartError:
        """The error for a part that raised another, with the line of the part where it did."""
        file = getattr(getattr(inspect.unwrap(self.function), "__code__", None), "co_filename", "")
        lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        where = f" at line {lines[-1].lineno} of {_file_words(file)}, `{lines[-1].line}`" if lines else ""
        said = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0].rstrip('.')}"
        if type(error).__module__.startswith("jax"):
            said += f". {TRACED}"
        return self.wrong(f"failed{where}: {said}")

    def signature(self) -> str:
        return f"{self.name}({', '.join(map(str, self.parameters.values()))})"


@dataclass(frozen=True)
class Spec(Generic[Traits]):
    """A part with values for all its arguments, including defaults."""

    part: Part[Traits]
    arguments: tuple[tuple[str, Any], ...]

    @property
    def traits(self) -> Traits:
        return self.part.traits

    def __str__(self) -> str:
        known = self.part.parameters
        shown = [(k, v) for k, v in self.arguments if not (known[k].later and v == known[k].default)]
        inside = ", ".join(f"{name}={value!r}" for name, value in shown)
        return f"{self.part.name}({inside})" if inside else self.part.name

    def __hash__(self) -> int:
        return hash(str(self))

    def of(self, function: Callable) -> dict[str, Any]:
        """The arguments that `function` takes (a part may share its arguments with a helper)."""
        return {k: v for k, v in self.arguments if k in inspect.signature(function).parameters}

    def __call__(self, *args: Any, **traced: Any) -> Any:
        try:
            return self.part.function(*args, **{**self.of(self.part.function), **traced})
        except (ConfigError, PartError):
            raise
        except Exception as error:
            if self.part.built_in:
                raise
            raise self.part.failed(error) from error


@dataclass
class Registry(Generic[Traits]):
    """Parts of one kind by name. A part also takes the arguments of its traits named in `helpers`."""

    kind: str
    given: int  # number of leading positional parameters that the simulator passes, besides a memory
    traits: Callable[..., Traits]  # the frozen dataclass of the traits, with defaults
    helpers: tuple[str, ...] = ()
    contract: str = ""  # what a part takes and returns, for error messages
    parts: dict[str, Part[Traits]] = field(default_factory=dict)

    @overload
    def register(self, function: Function) -> Function: ...

    @overload
    def register(
        self, function: None = None, *, name: str | None = None, **traits: Any
    ) -> Callable[[Function], Function]: ...

    def register(self, function=None, *, name=None, **traits):
        """Decorator: `@rules.register` or `@rules.register(defends=False)`. Registering again replaces."""
        if function is None:
            return lambda f: self._register(f, name, traits)
        return self._register(function, name, traits)

    def _register(self, function: Function, name: str | None, given: dict[str, Any]) -> Function:
        known = inspect.signature(self.traits).parameters
        if unknown := set(given) - set(known):
            raise ConfigError(f"a {self.kind} has no trait {listed(unknown)}; there are {listed(known)}")
        traits = self.traits(**given)
        given_first = self.given + (getattr(traits, "init", None) is not None)  # a memory comes last
        taken = list(_signature(function).parameters.values())
        places = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(places) < given_first and not any(p.kind is p.VAR_POSITIONAL for p in taken):
            called = name or function.__name__
            takes = f"takes {len(places)} arguments, but is called with {given_first}"
            raise ConfigError(f"{self.kind} {called!r} {takes}. {self.contract}".rstrip())
        parameters = {
            p.name: Argument.of(p)
            for p in taken[given_first:]
            if p.kind is p.POSITIONAL_OR_KEYWORD  # users cannot give keyword-only parameters
        }
        for helper in filter(None, (getattr(traits, name) for name in self.helpers)):
            shared = map(Argument.of, _signature(helper).parameters.values())
            parameters |= {argument.name: argument for argument in shared if argument.allowed}
        name = name or function.__name__
        old = self.parts.get(name)
        if old and old.built_in and old.function.__module__ != function.__module__:
            raise ConfigError(f"{self.kind} {name!r} is built in; register yours under another name")
        self.parts[name] = Part(name, function, parameters, traits, self.kind, self.contract)
        return function

    def get(self, name: str) -> Part[Traits]:
        if name not in self.parts:
            raise ConfigError(
                f"unknown {self.kind} {shown(name)}{nearest(name, self.parts)}; "
                f"there are {listed(self.parts)}"
            )
        return self.parts[name]

    def parse(self, text: str, fill: dict[str, Any] | None = None) -> Spec[Traits]:
        """'name(key=value)' -> Spec; `fill` gives values for arguments missing from the text."""
        name, positional, keywords = split_spec(text, self.kind)
        part = self.get(name)
        if len(positional) > len(part.parameters):
            raise ConfigError(f"{text!r} gives too many arguments; usage: {part.signature()}")
        given = dict(zip(part.parameters, positional, strict=False))
        for key, value in keywords.items():
            if key not in part.parameters:
                usage = f"usage: {part.signature()}" if part.parameters else "it takes no arguments"
                raise ConfigError(
                    f"{self.kind} {name!r} has no argument {key!r}{nearest(key, part.parameters)}; {usage}"
                )
            if key in given:
                raise ConfigError(f"{text!r} gives {key!r} twice")
            given[key] = value
        arguments = []
        for key, parameter in part.parameters.items():
            value = given.get(key, (fill or {}).get(key, parameter.default))
            if value is inspect.Parameter.empty:
                raise ConfigError(f"{self.kind} {name!r} needs {key}=; usage: {part.signature()}")
            if allowed := parameter.allowed:
                if not allowed.accepts(value):
                    raise ConfigError(
                        f"{self.kind} {name!r}: {key}={shown(value)} is not allowed; {key} is {allowed}"
                        f"{allowed.limits(value)}"
                    )
                value = allowed.clean(value)
            elif parameter.is_text and not isinstance(value, str):
                raise ConfigError(
                    f"{self.kind} {name!r}: {key}={shown(value)} is not allowed; {key} is a word or a text "
                    "in quotes"
                )
            arguments.append((key, value))
        return Spec(part, tuple(arguments))

    def sources(self, spec: Spec[Traits]) -> list[str]:
        """Source texts of the user-defined parts in a spec: the part and parts named in its arguments."""
        named = [spec, *self.inner(spec)]
        return [each.part.source for each in named if not each.part.built_in]

    def inner(self, spec: Spec[Traits]) -> list[Spec[Traits]]:
        """The parts that are named in the arguments of a spec, as in sleeper(alie), and in theirs."""
        texts = [v for _, v in spec.arguments if isinstance(v, str) and v.split("(")[0] in self.parts]
        named = [self.parse(text) for text in texts]
        return [each for part in named for each in (part, *self.inner(part))]

    def listing(self) -> str:
        """All parts with their arguments, defaults, descriptions and ranges, as text."""
        lines = []
        for part in self.parts.values():
            lines.append(f"  {part.signature()}")
            lines.append(textwrap.indent(part.description, "      "))
            lines += [
                f"        {argument.name}: {argument.allowed}"
                for argument in part.parameters.values()
                if argument.allowed
            ]
        return "\n".join(lines)


def _file_words(path: str) -> str:
    """A source file in a message: the cell of a notebook, or the file's name."""
    in_cell = "ipykernel_" in path or path.startswith("<ipython-input")
    return "the cell" if in_cell else Path(path).name


def _signature(function: Callable) -> inspect.Signature:
    """The signature with evaluated annotations, also if the module postpones their evaluation."""
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:  # an annotation imported only under TYPE_CHECKING
        return inspect.signature(function)


def split_spec(text: str, kind: str = "spec") -> tuple[str, list[Any], dict[str, Any]]:
    """'f(1, a=x)' -> ('f', [1], {'a': 'x'}). Bare words are strings; a nested call stays a spec."""
    hint = (
        f"{kind} {shown(text)} is malformed; write a name or name(argument=value, ...), and quote a value "
        "that is neither a number nor a word, such as path='nets/a.txt'"
    )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # null bytes, deep nesting
        raise ConfigError(hint) from error
    if isinstance(tree, ast.Name):
        return tree.id, [], {}
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise ConfigError(hint)

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Name | ast.Call):
            return ast.unparse(node)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise ConfigError(hint) from error

    if any(k.arg is None for k in tree.keywords) or len({k.arg for k in tree.keywords}) < len(tree.keywords):
        raise ConfigError(hint)
    positional = [value(a) for a in tree.args]
    return tree.func.id, positional, {k.arg: value(k.value) for k in tree.keywords if k.arg is not None}


def shown(value: Any) -> str:
    """repr of a value for error messages, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # integer too long for repr
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def listed(names: Any) -> str:
    return ", ".join(sorted(names))


def load_plugin(name: str) -> None:
    """Imports a module, or a file by its path, so that it registers its parts."""
    try:
        if name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(name).stem, name)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"plugin {name!r} cannot be imported ({type(error).__name__}: {error}); give an importable "
            "module or a .py file"
        ) from error
