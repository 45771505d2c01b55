"""A background thread that keeps a few items ready; its errors are raised where the items are taken."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Runs an iterator ahead by at most `depth` items. Iterate it once; `close` ends the thread."""

    def __init__(self, items: Iterator[T], depth: int = 1) -> None:
        self._items = items
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raydist-data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[T, float]]:
        """Items, each with the seconds it was waited for."""
        while True:
            began = time.perf_counter()
            item, error = self._queue.get()
            if error is not None:
                self._thread.join()
                if isinstance(error, StopIteration):
                    return
                raise error
            yield item, time.perf_counter() - began  # type: ignore[misc]

    def close(self) -> None:
        """Stop and join the thread; what it prepared is dropped."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:  # raised again by the reader
            self._put((None, error))
        finally:
            if isinstance(self._items, Generator):
                self._items.close()

    def _put(self, entry: tuple[T | None, BaseException | None]) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
