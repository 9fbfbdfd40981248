"""How a contender in another process takes turns: lines of JSON over its standard input and output.

The contender writes {"ready": true} when it can begin its first round. It reads a number of rounds, does them, writes
how long they took and reads the next number. At the end of its input it writes its model to a file and ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Turns", "Work"]


class Work:
    """A job written out by `jobs.write_work`: arrays by name, and the settings in `job`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.job: dict[str, Any] = json.loads((self.folder / "job.json").read_text())

    def array(self, name: str) -> np.ndarray:
        """One of the arrays, in memory."""
        values: np.ndarray = np.load(self.folder / f"{name}.npy")
        return values

    def initial(self) -> dict[str, np.ndarray]:
        """The initial parameters by name."""
        with np.load(self.folder / "initial.npz") as archive:
            return {name: archive[name] for name in archive.files}

    def finish(self, name: str, params: dict[str, np.ndarray]) -> None:
        """Write the final parameters."""
        np.savez(self.folder / f"final-{name}.npz", **params)  # type: ignore[arg-type]

    def evaluated(self, index: int) -> bool:
        """Whether the test accuracy is measured after round `index`."""
        every = self.job["evaluate_every"]
        return every is not None and (index + 1) % every == 0

    def measured(self, index: int) -> bool:
        """Whether the losses of all clients are measured after round `index`."""
        every = self.job["losses_every"]
        return every is not None and (index + 1) % every == 0


class Turns:
    """The side of the contender. Its standard output is redirected to the standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.left = 0
        """Rounds left in this turn."""
        self._start = 0.0
        self._first: float | None = None
        self._accuracy: float | None = None

    def _say(self, **words: Any) -> None:
        self._out.write(json.dumps(words) + "\n")
        self._out.flush()

    def _wait(self) -> bool:
        line = sys.stdin.readline()
        if not line.strip():
            return False
        self.left, self._first = int(line), None
        self._start = time.perf_counter()
        return True

    def begin(self) -> bool:
        """Report that the first round can begin. False: there is nothing to do."""
        self._say(ready=True)
        return self._wait()

    def done(self, accuracy: float | None = None) -> bool:
        """Report that a round is done. False: it was the last."""
        now = time.perf_counter() - self._start
        if self._first is None:
            self._first = now
        if accuracy is not None:
            self._accuracy = float(accuracy)
        self.left -= 1
        if self.left > 0:
            return True
        self._say(seconds=now, first=self._first, accuracy=self._accuracy)
        return self._wait()

    def missing(self, error: ImportError) -> None:
        """Report that the library of this contender is not installed."""
        self._say(missing=str(error))
