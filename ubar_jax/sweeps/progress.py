"""Progress of a sweep: a bar on a terminal; elsewhere (log file, batch queue) a line every 30 seconds."""

import contextlib
import sys
import threading
from collections.abc import Iterator

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


@contextlib.contextmanager
def progress_bar(rounds: int) -> Iterator[tqdm]:
    """A bar over all rounds of a sweep."""
    if sys.stderr.isatty():
        with tqdm(total=rounds, unit="round") as bar:
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
