"""Shared by all commands: flags, flagfiles, error messages and exit codes.

Bad flags or settings print one message, `error: ...`; exit code 2. Ctrl-C: exit code 130. Full disk: 4.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags, logging

from ubar_jax.files import disk_is_full
from ubar_jax.registry import ConfigError, shown


def launch(main: Callable[[Sequence[str]], int | None]) -> None:
    """Parses the flags, runs a command's `main`, and exits with the code that it returns."""
    app.run(lambda argv: guarded(main, argv), flags_parser=parse)


def guarded(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int | None:
    """Runs `main`; errors that the user can fix are printed as one message, without a traceback."""
    logging.set_verbosity(logging.FATAL)  # errors are reported below, once
    try:
        return main(argv)
    except ConfigError as error:
        return refuse(error)
    except BrokenPipeError:  # the reader of a pipe, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("\nstopped; run the same command to continue", file=sys.stderr)
        return 130
    except Exception as error:
        if not disk_is_full(error):
            raise
        told = "the disk is full; finished runs are saved. Free space and run the same command to continue"
        print(f"error: {told}", file=sys.stderr)
        return 4


def refuse(error: Exception) -> int:
    """Reports bad input; returns its exit code."""
    print(f"error: {error}", file=sys.stderr)
    return 2


def parse(argv: Sequence[str]) -> list[str]:
    """Parses flags, including those in flagfiles; exits if they are invalid."""
    try:
        return flags.FLAGS([argv[0], *expanded(argv[1:])])
    except (ConfigError, flags.Error) as error:
        told = " ".join(str(error).split())
        sys.exit(refuse(ConfigError(told if isinstance(error, ConfigError) else f"{told} (try --help)")))


def expanded(args: Sequence[str], inside: tuple[Path, ...] = ()) -> list[str]:
    """The arguments, with every --flagfile replaced by its lines; `inside` are the flagfiles being read."""
    found: list[str] = []
    left = list(args)
    while left:
        arg = left.pop(0)
        name, equals, path = arg.partition("=")
        if arg == "--":
            return [*found, arg, *left]
        if name not in ("--flagfile", "-flagfile"):
            found.append(arg)
            continue
        if not equals:
            path = left.pop(0) if left else ""
        file = _found(path)
        if file.absolute() in inside:
            raise ConfigError(f"flagfile {path!r} includes itself; remove that line")
        found += expanded(_lines(path, file), (*inside, file.absolute()))
    return found


def shipped() -> dict[str, Path]:
    """The flagfiles that come with the package, by name; those in folders as `folder/name`."""
    here = Path(__file__).parent
    installed, checkout = here / "flagfiles", here.parents[1] / "experiments"  # see setup.py
    home = installed if installed.is_dir() else checkout
    files = sorted(home.rglob("*.flags"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(home).with_suffix("").as_posix(): file for file in files}


def _found(path: str) -> Path:
    """The file at a path; if there is none, the shipped flagfile of that name."""
    file = Path(path).expanduser()
    return file if file.is_file() else shipped().get(path.removesuffix(".flags"), file)


def _lines(path: str, file: Path) -> list[str]:
    if not path.strip():
        raise ConfigError("--flagfile is empty; give it the name of a file")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigError(
            f"flagfile {shown(path)} cannot be read ({why}); looked in {Path.cwd()} and among the shipped "
            f"ones: {', '.join(name for name in shipped() if '/' not in name)}, paper/cpu/..., paper/gpu/..."
        ) from error
    lines = [line.strip() for line in lines]
    return [line for line in lines if line and not line.startswith(("#", "//"))]


def must_be_named(*names: str) -> None:
    """Refuses the empty string as the value of these flags."""
    for name in names:
        flags.register_validator(
            name,
            lambda v: v is None or (bool(v) and all(v)),
            message=f"is empty; leave --{name} out or name one",
        )
