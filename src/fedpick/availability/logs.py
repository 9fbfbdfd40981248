"""Device logs: when real devices could be reached, as lists of events, and the readers for the forms they come in.

| format     | file                                                                                        |
|------------|---------------------------------------------------------------------------------------------|
| npz        | arrays `offsets (D+1,)`, `t (E,)`, `state (E,)`, optionally `period (D,)`; with a prefix    |
|            | `NAME_` each if the file holds several logs                                                 |
| csv        | columns `client,time,state`, one event per line                                             |
| fedscale   | pickle of {client id: {'active': [s], 'inactive': [s], 'finish_time': s, ...}}              |
| flash-json | {device id: {'messages': "2020-01-28 18:00:00<tab>battery_charged_on<newline>..."}}         |

Times are seconds. A state holds until the next event: 0 unavailable, 1 available for evaluation only, 2 available for
training. FedScale's and FLASH's logs know only 0 and 2.
"""

from __future__ import annotations

import csv
import json
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.errors import DataError, InvalidInput
from fedpick.core.validation import assign

__all__ = ["FORMATS", "DeviceLogs", "read_csv", "read_fedscale", "read_flash_json", "read_logs", "read_npz"]

DAY = 86_400.0
_AVAILABLE = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceLogs:
    """Events of D devices, E in all: device d has `times[offsets[d]:offsets[d + 1]]`, in ascending order."""

    offsets: IntArray
    """(D + 1,)"""
    times: FloatArray
    """(E,) seconds since the start of the log."""
    states: NDArray[np.uint8]
    """(E,) the state that holds from then on. Before its first event a device is in state 0."""
    period: FloatArray
    """(D,) seconds after which a device's log starts again."""

    def __post_init__(self) -> None:
        offsets = np.asarray(self.offsets, dtype=np.int64)
        times = np.asarray(self.times, dtype=np.float64)
        states = np.asarray(self.states)
        period = np.asarray(self.period, dtype=np.float64)
        if offsets.ndim != 1 or len(offsets) < 2 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise InvalidInput("DeviceLogs.offsets must be ascending, start at 0 and have one entry more than devices.")
        if times.shape != (offsets[-1],) or states.shape != times.shape or period.shape != (len(offsets) - 1,):
            raise InvalidInput(
                f"DeviceLogs needs one time and one state per event and one period per device: offsets announce "
                f"{offsets[-1]} events of {len(offsets) - 1} devices. Got {times.shape} times, {states.shape} states, "
                f"{period.shape} periods."
            )
        if states.size and not (np.isin(states, (0, 1, 2)).all()):
            raise InvalidInput("DeviceLogs.states must be 0 (unavailable), 1 (evaluation only) or 2 (training).")
        if not (np.isfinite(times).all() and np.isfinite(period).all() and (period > 0).all()):
            raise InvalidInput("DeviceLogs.times must be finite and DeviceLogs.period finite and above 0.")
        within = np.repeat(np.arange(len(period)), np.diff(offsets))
        descends = (np.diff(times) < 0) & (within[1:] == within[:-1])
        if (times.size and times.min() < 0) or descends.any():
            raise InvalidInput("DeviceLogs.times must be at least 0 and ascending within each device.")
        assign(self, offsets=offsets, times=times, period=period, states=states.astype(np.uint8))

    def __len__(self) -> int:
        return len(self.period)


def read_logs(
    path: str | Path, *, format: str = "auto", series: str | None = None, requirements: Sequence[str] | None = None
) -> DeviceLogs:
    """Read device logs; `auto` goes by the ending: .npz, .csv, .json (FLASH), .pkl, .pickle or none (FedScale)."""
    path = Path(path)
    if format == "auto":
        format = _ENDINGS.get(path.suffix.lower(), "")
        if not format:
            raise InvalidInput(
                f"The format of {path.name} cannot be told from its ending. Say format=, one of {', '.join(FORMATS)}."
            )
    if not path.is_file():
        raise DataError(f"There is no file of device logs at {path}. Give the path of one, relative to where you run.")
    if format == "npz":
        return read_npz(path, series)
    if format == "flash-json":
        return read_flash_json(path, requirements or FLASH_REQUIREMENTS)
    if format not in FORMATS:
        raise InvalidInput(f"format must be 'auto' or one of {', '.join(FORMATS)}. Got {format!r}.")
    return read_csv(path) if format == "csv" else read_fedscale(path)


def _whole_days(horizon: float) -> float:
    # A log that starts again must do so at the same time of the day; shorter ones simply start again.
    return horizon // DAY * DAY if horizon >= DAY else max(horizon, 1.0)


def read_npz(path: str | Path, series: str | None = None) -> DeviceLogs:
    """Logs stored as arrays; `series` is the prefix when a file holds several.

    Without a `period` array, a log starts again after the whole days between 0 and its last event.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is damaged or not an .npz file of arrays: {error}.") from error
    found = sorted(name.removesuffix("offsets").rstrip("_") for name in arrays if name.endswith("offsets"))
    if series is None and len(found) == 1:
        series = found[0]
    if series is None or series not in found:
        raise DataError(
            f"{path} holds the logs {', '.join(map(repr, found)) or '(none)'}; "
            f"{'say which one with series=' if series is None else f'there is no {series!r}'}."
        )
    prefix = f"{series}_" if series else ""
    missing = [name for name in ("t", "state") if prefix + name not in arrays]
    if missing:
        raise DataError(f"{path} has {prefix}offsets but no {prefix}{missing[0]}.")
    times = arrays[prefix + "t"].astype(np.float64)
    offsets = arrays[prefix + "offsets"]
    period = arrays.get(prefix + "period")
    if period is None:
        period = np.full(len(offsets) - 1, _whole_days(float(times.max(initial=0.0))))
    return _checked(path, offsets, times, arrays[prefix + "state"], np.broadcast_to(period, len(offsets) - 1))


def read_csv(path: str | Path) -> DeviceLogs:
    """Events as lines of `client,time,state` under a header, in any order; devices come in order of appearance."""
    devices: dict[str, int] = {}
    rows: list[tuple[int, float, int]] = []
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = {"client", "time", "state"} - set(reader.fieldnames or ())
        if missing:
            raise DataError(
                f"{path} needs a header with the columns client, time and state. Missing: {', '.join(sorted(missing))}."
            )
        for row in reader:
            try:
                rows.append((devices.setdefault(row["client"], len(devices)), float(row["time"]), int(row["state"])))
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{path}, line {reader.line_num}: expected a client, a time in seconds and a state. Got {row}."
                ) from error
    if not rows:
        raise DataError(f"{path} holds no events.")
    device, times, states = (np.array(column) for column in zip(*rows, strict=True))
    return _from_events(path, device, times, states, len(devices), None)


def read_flash_json(path: str | Path, requirements: Sequence[str] = ("charging", "wifi", "locked")) -> DeviceLogs:
    """FLASH's state traces. A device is available while it meets all requirements, of charging, wifi and locked.

    The log's clock starts at midnight of the first day in the file, so the time of the day is kept.
    """
    wrong = [name for name in requirements if name not in FLASH_REQUIREMENTS]
    if wrong:
        raise InvalidInput(f"requirements may name {', '.join(FLASH_REQUIREMENTS)}. Got {wrong[0]!r}.")
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is not a JSON file: {error}.") from error
    if not isinstance(table, dict) or not table:
        raise DataError(f"{path} must hold an object of devices. Got {type(table).__name__} of length {len(table)}.")
    device: list[int] = []
    moments: list[datetime] = []
    states: list[int] = []
    for index, (name, record) in enumerate(table.items()):
        if not isinstance(record, dict) or not isinstance(record.get("messages"), str):
            raise DataError(f"{path}: device {name!r} has no text under 'messages'.")
        for moment, state in _flash_events(f"{path}: device {name!r}", record["messages"], requirements):
            device.append(index)
            moments.append(moment)
            states.append(state)
    if not moments:
        raise DataError(f"{path} holds no events.")
    first = min(moments)
    midnight = datetime(first.year, first.month, first.day)
    times = np.array([(moment - midnight).total_seconds() for moment in moments])
    return _from_events(path, np.array(device), times, np.array(states), len(table), None)


FLASH_REQUIREMENTS = ("charging", "wifi", "locked")
# What each message of a FLASH log says; battery percentages and other messages change no requirement.
_FLASH_MESSAGES = {
    "battery_charged_on": ("charging", True),
    "battery_charged_off": ("charging", False),
    "wifi": ("wifi", True),
    **dict.fromkeys(("unknown", "2g", "3g", "4g", "5g"), ("wifi", False)),
    "screen_lock": ("locked", True),
    "screen_unlock": ("locked", False),
}


def _flash_events(where: str, messages: str, requirements: Sequence[str]) -> Iterable[tuple[datetime, int]]:
    met = dict.fromkeys(FLASH_REQUIREMENTS, False)
    for number, line in enumerate(messages.splitlines(), start=1):
        if not line.strip():
            continue
        stamp, _, message = line.strip().partition("\t")
        try:
            moment = datetime.strptime(stamp.strip(), "%Y-%m-%d %H:%M:%S")
        except ValueError as error:
            raise DataError(f"{where}, message {number}: expected 'date time<tab>message'. Got {line!r}.") from error
        requirement, value = _FLASH_MESSAGES.get(message.strip().lower(), (None, False))
        if requirement is not None:
            met[requirement] = value
        yield moment, _AVAILABLE * all(met[name] for name in requirements)


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings, lists and dicts. Whatever would import or call something is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise DataError(
            f"The pickle asks for {module}.{name}. A FedScale behaviour trace holds whole numbers, strings, lists and "
            "dicts only; anything else could run code and is refused. Do not load this file with plain pickle either."
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise DataError("The pickle refers to an object outside itself, which a FedScale behaviour trace never does.")


def read_fedscale(path: str | Path) -> DeviceLogs:
    """FedScale's behaviour trace, unpickled in a reader that refuses everything but plain values.

    A client is available from each `active` time to the matching `inactive` time; the pattern repeats after its
    `finish_time`. A pattern that begins with an `inactive` time was available from the start.
    """
    try:
        with Path(path).open("rb") as file:
            table = _PlainUnpickler(file).load()
    except DataError as error:
        raise DataError(f"{path} is refused. {error}") from error.__cause__
    except Exception as error:  # a damaged pickle fails in any way
        raise DataError(f"{path} is damaged or not a pickle: {type(error).__name__}: {error}.") from error
    if type(table) is not dict or not table:
        raise DataError(f"{path} must hold a dict of clients. Got {type(table).__name__}.")
    device: list[int] = []
    times: list[int] = []
    states: list[int] = []
    period: list[int] = []
    for index, (name, record) in enumerate(table.items()):
        active, inactive, finish = _fedscale_record(f"{path}: client {name!r}", record)
        if inactive and (not active or min(inactive) < min(active)):
            active = [0, *active]
        active, inactive = _without_empty_sessions(sorted(active), sorted(inactive))
        device += [index] * (len(active) + len(inactive))
        times += active + inactive
        states += [_AVAILABLE] * len(active) + [0] * len(inactive)
        period.append(finish)
    return _from_events(path, np.array(device), np.array(times), np.array(states), len(table), np.array(period))


def _without_empty_sessions(active: list[int], inactive: list[int]) -> tuple[list[int], list[int]]:
    """The starts and ends of sessions, without those that end when they begin; a start beyond the last end stays."""
    empty = {position for position, ends in enumerate(zip(active, inactive, strict=False)) if ends[0] == ends[1]}
    starts, ends = ([time for at, time in enumerate(times) if at not in empty] for times in (active, inactive))
    return starts, ends


def _fedscale_record(where: str, record: object) -> tuple[list[int], list[int], int]:
    if type(record) is not dict:
        raise DataError(f"{where}: expected a dict. Got {type(record).__name__}.")
    for name in ("active", "inactive"):
        values = record.get(name)
        if type(values) is not list or not all(type(value) is int and value >= 0 for value in values):
            raise DataError(f"{where}: {name!r} must be a list of whole numbers of at least 0.")
    finish = record.get("finish_time")
    if type(finish) is not int or finish < 1:
        raise DataError(f"{where}: 'finish_time' must be a whole number of at least 1. Got {finish!r}.")
    return record["active"], record["inactive"], finish


def _from_events(
    path: str | Path,
    device: NDArray[Any],
    times: NDArray[Any],
    states: NDArray[Any],
    num_devices: int,
    period: NDArray[Any] | None,
) -> DeviceLogs:
    # Events of one device at one moment keep their order, so that the last one holds; a FedScale session that ends when
    # the next one begins lists its end later, so there the start must come last: hence states break ties for it.
    keys = (times, device) if period is None else (states, times, device)
    order = np.lexsort(keys)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(device.astype(np.int64), minlength=num_devices))])
    if period is None:
        period = np.full(num_devices, _whole_days(float(times.max())))
    return _checked(path, offsets, times[order], states[order], period)


def _checked(
    path: str | Path, offsets: ArrayLike, times: ArrayLike, states: ArrayLike, period: ArrayLike
) -> DeviceLogs:
    try:
        # DeviceLogs turns what is array-like into arrays, and checks it.
        return DeviceLogs(offsets=offsets, times=times, states=states, period=period)  # type: ignore[arg-type]
    except InvalidInput as error:
        raise DataError(f"{path} is not a usable log. {error}") from error


FORMATS: Mapping[str, Callable[..., DeviceLogs]] = {
    "npz": read_npz,
    "csv": read_csv,
    "fedscale": read_fedscale,
    "flash-json": read_flash_json,
}
_ENDINGS = {
    ".npz": "npz",
    ".csv": "csv",
    ".json": "flash-json",
    ".pkl": "fedscale",
    ".pickle": "fedscale",
    "": "fedscale",
}
