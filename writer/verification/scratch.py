"""Arrays that are used again and again. Owns their memory: fresh pages for a step would cost as much as the step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Scratch:
    """Hands out arrays by name. What one holds is gone when its name is asked for again; for one thread."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[np.uint64]] = {}

    def words(self, name: str, count: int) -> npt.NDArray[np.uint64]:
        """Give an array of that name, with anything in it."""
        array = self._arrays.get(name)
        if array is None or len(array) < count:
            array = self._arrays[name] = np.empty(count, np.uint64)
        return array[:count]

    def longs(self, name: str, count: int) -> npt.NDArray[np.int64]:
        """Give the array of that name as signed numbers."""
        return self.words(name, count).view(np.int64)
