"""How an engine in a process of its own takes turns: lines of JSON over its standard input and output.

The engine says {"ready": true} when it could begin its first round. It is told how many rounds to do, does them, says
how long they took and waits for the next number; at the end of its input it writes its model and ends.
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
    """A job that was written out (see `_jobs.write_work`): arrays by name, and the settings in `job`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.job: dict[str, Any] = json.loads((self.folder / "job.json").read_text())

    def array(self, name: str) -> np.ndarray:
        """One of the arrays, in memory."""
        values: np.ndarray = np.load(self.folder / f"{name}.npy")
        return values

    def initial(self) -> dict[str, np.ndarray]:
        """The model at the start, by name."""
        with np.load(self.folder / "initial.npz") as archive:
            return {name: archive[name] for name in archive.files}

    def finish(self, engine: str, params: dict[str, np.ndarray]) -> None:
        """Write the model at the end."""
        np.savez(self.folder / f"final-{engine}.npz", **params)  # type: ignore[arg-type]

    def evaluated(self, index: int) -> bool:
        """Whether the test set is looked at after round `index`."""
        every = self.job["evaluate_every"]
        return every is not None and (index + 1) % every == 0

    def measured(self, index: int) -> bool:
        """Whether everybody's loss is measured after round `index`."""
        every = self.job["losses_every"]
        return every is not None and (index + 1) % every == 0


class Turns:
    """The engine's side. What it or its libraries print goes to the standard error instead."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._left = 0
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
        self._left, self._first = int(line), None
        self._start = time.perf_counter()
        return True

    def begin(self) -> bool:
        """Ready for the first round. False: there is nothing to do."""
        self._say(ready=True)
        return self._wait()

    def done(self, accuracy: float | None = None) -> bool:
        """One more round is done. False: it was the last."""
        now = time.perf_counter() - self._start
        if self._first is None:
            self._first = now
        if accuracy is not None:
            self._accuracy = float(accuracy)
        self._left -= 1
        if self._left > 0:
            return True
        self._say(seconds=now, first=self._first, accuracy=self._accuracy)
        return self._wait()

    def missing(self, error: ImportError) -> None:
        """The library of this engine is not installed."""
        self._say(missing=str(error))
