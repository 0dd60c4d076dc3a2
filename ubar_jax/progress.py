"""Progress of runs: a bar on a terminal or in a notebook; elsewhere a line every 30 seconds."""

import contextlib
import importlib.util
import io
import sys
import threading
from collections.abc import Callable, Iterator

from tqdm import tqdm

EVERY = 30.0  # seconds between two lines
LINE = "{desc}{n_fmt} of {total_fmt} rounds, {elapsed} so far, about {remaining} left{postfix}"


class _Lines:
    """A file for tqdm that writes each state of the bar on its own line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _bar_class() -> type[tqdm]:
    """The bar for a terminal or, where ipywidgets draws them, for a notebook."""
    if in_notebook() and importlib.util.find_spec("ipywidgets"):
        from tqdm.notebook import tqdm as widget

        return widget
    return tqdm


def compiling(bar: tqdm) -> Callable[[str], None]:
    """A callback for messages about the compilation, "" when it is over; the bar shows the word compiling."""
    return lambda words: bar.set_postfix_str("compiling" if words else "")


@contextlib.contextmanager
def progress_bar(rounds: int) -> Iterator[tqdm]:
    """A bar over the rounds of one run or of a sweep."""
    if sys.stderr.isatty() or in_notebook():
        with _bar_class()(total=rounds, unit="round") as bar:
            yield bar
        return
    never = float("inf")  # only the thread below shows the bar
    over = threading.Event()
    look = {"bar_format": LINE, "delay": 1, "leave": False, "mininterval": never, "maxinterval": never}
    with tqdm(total=rounds, file=_Lines(), **look) as bar:
        show_now, bar.refresh = bar.refresh, lambda *args, **kwargs: None

        def show() -> None:
            while not over.wait(EVERY):
                show_now()

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield bar
        finally:
            over.set()
            thread.join()


@contextlib.contextmanager
def silent_bar(rounds: int, tell: Callable[[tqdm], None], say: Callable[[str], None]) -> Iterator[tqdm]:
    """A bar that draws nothing: `tell` gets it when it changed, `say` gets what it would print."""
    with tqdm(total=rounds, file=io.StringIO(), mininterval=0, miniters=1) as bar:
        bar.refresh, bar.write = lambda lock_args=None: tell(bar), say
        yield bar
