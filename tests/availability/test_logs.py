from __future__ import annotations

import collections
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from fedpick import availability
from fedpick.availability.logs import read_csv, read_fedscale, read_flash_json, read_logs, read_npz
from fedpick.availability.process import trace_stream
from fedpick.core.errors import DataError, FedpickWarning, InvalidInput
from fedpick.core.types import Clients

PHONES = Path(__file__).parents[2] / "../shared/data/flash300_availability.npz"


def crowd(count):
    return Clients(num_examples=np.ones(count))


def replay(path, count, **parameters):
    parameters.setdefault("assignment", "order")
    return availability.get("trace", path=str(path), **parameters).start(crowd(count), seed=0)


@pytest.fixture
def two_days(tmp_path):
    """Device 0 is on from 06:00 to 12:00 of day 0 only; device 1 from 10 s on, and off at the end of day 1."""
    path = tmp_path / "two_days.csv"
    rows = ["a,0,0", "a,21600,2", "a,43200,0", "b,10,1", "b,172800,0"]
    path.write_text("client,time,state\n" + "\n".join(rows) + "\n")
    return path


def test_a_state_holds_until_the_next_event_and_the_log_starts_again(two_days):
    trace = replay(two_days, 2, round_seconds=3600)
    on = [t for t in range(96) if trace.mask(t)[0]]
    assert on == [6, 7, 8, 9, 10, 11, 54, 55, 56, 57, 58, 59]
    np.testing.assert_allclose(trace.availability, [6 / 48, 0])
    late = replay(two_days, 2, round_seconds=3600, offset_seconds=5.5 * 3600)
    assert [t for t in range(10) if late.mask(t)[0]] == [1, 2, 3, 4, 5, 6]


def test_the_state_threshold_decides_who_counts(two_days):
    trace = replay(two_days, 2, round_seconds=5, least_state=1)
    assert [bool(trace.mask(t)[1]) for t in range(4)] == [False, False, True, True]
    assert trace.availability[1] == pytest.approx(1 - 10 / 172800)
    only_evaluation = two_days.with_name("e.csv")
    only_evaluation.write_text("client,time,state\nx,0,1\n")
    with pytest.raises(InvalidInput, match="smaller least_state"):
        replay(only_evaluation, 1)


def test_before_its_first_event_a_device_is_unavailable_whatever_its_neighbour_does(tmp_path):
    path = tmp_path / "neighbours.csv"
    path.write_text("client,time,state\na,0,2\nb,40,2\nb,100,0\n")
    trace = replay(path, 2, round_seconds=10)
    assert [tuple(trace.mask(t)) for t in (0, 3, 4, 13, 14)] == [(True, on) for on in (False, False, True, False, True)]


def test_more_clients_than_devices_are_whole_day_shifts(two_days):
    trace = replay(two_days, 6, round_seconds=3600)
    assert list(trace.device) == [0, 1] * 3
    assert list(trace.shift_days) == [0, 0, 1, 1, 0, 0]
    for t in range(48):
        mask = trace.mask(t)
        assert mask[2] == trace.mask(t + 24)[0]
        assert mask[4] == mask[0]


def test_fewer_clients_than_devices_are_drawn_without_replacement(tmp_path):
    path = tmp_path / "many.npz"
    np.savez(path, offsets=np.arange(51), t=np.zeros(50), state=np.full(50, 2))
    trace = availability.get("trace", path=str(path)).start(crowd(20), seed=4)
    assert len(set(trace.device)) == 20
    assert not np.array_equal(trace.device, np.arange(20))
    assert trace.mask(7).all()


def test_correlation_of_a_trace_is_that_of_moments_one_round_apart(tmp_path):
    path = tmp_path / "square.csv"  # on for the first half of every hour
    rows = [f"a,{hour * 3600 + half * 1800},{2 * (half == 0)}" for hour in range(24) for half in (0, 1)]
    path.write_text("client,time,state\n" + "\n".join([*rows, "a,86400,0"]))
    assert replay(path, 1, round_seconds=1800).correlation[0] == pytest.approx(-1)
    assert replay(path, 1, round_seconds=900).correlation[0] == pytest.approx(0, abs=0.01)
    assert replay(path, 1, round_seconds=450).correlation[0] == pytest.approx(0.5, abs=0.01)


def test_csv_and_npz_say_the_same(two_days, tmp_path):
    logs = read_csv(two_days)
    path = tmp_path / "same.npz"
    np.savez(path, x_offsets=logs.offsets, x_t=logs.times, x_state=logs.states, x_period=logs.period)
    for again in (read_npz(path), read_npz(path, "x"), read_logs(path)):
        np.testing.assert_array_equal(again.times, logs.times)
        np.testing.assert_array_equal(again.states, logs.states)
        np.testing.assert_array_equal(again.period, logs.period)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("phone,time,state\na,0,1\n", "Missing: client"),
        ("client,when,state\na,0,1\n", "Missing: time"),
        ("client,time,state\na,soon,1\n", "line 2"),
        ("client,time,state\na,0,1\nb,3\n", "line 3"),
        ("client,time,state\n", "no events"),
        ("client,time,state\na,0,2\na,0,5\n", "line 3: states must be"),
        ("client,time,state\na,0,\n", "line 2: states must be"),
        ("client,time,state\na,-4,2\n", "line 2: times must be at least 0"),
        ("client,time,state\na,nan,2\n", "line 2: times must be"),
        ("client,time,state\n,1,2\n", "line 2: the client is missing"),
        ("client,time,state\na,1,2\na,2024-05-01T00:00:00,0\n", "line 3: all times must be of one kind"),
        ("client,time,state\na,2024-05-01T00:00Z,2\na,2024-05-01T00:00,0\n", "line 3: all times must be of one kind"),
    ],
)
def test_bad_csv_is_refused_with_the_place(tmp_path, text, says):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=says):
        read_csv(path)


def test_bad_npz_is_refused(tmp_path):
    path = tmp_path / "bad.npz"
    path.write_bytes(b"not a zip")
    with pytest.raises(DataError, match="damaged"):
        read_npz(path)
    np.savez(path, offsets=np.array([0, 2]), t=np.array([5, 1]), state=np.array([0, 2]))
    with pytest.raises(DataError, match="ascending"):
        read_npz(path)
    np.savez(path, a_offsets=np.array([0]), b_offsets=np.array([0]))
    with pytest.raises(DataError, match=r"'a', 'b'; pass one of them"):
        read_npz(path)
    with pytest.raises(DataError, match="no 'c'"):
        read_npz(path, "c")
    np.savez(path, offsets=np.array([0, 1]), t=np.array([0]), state=np.array([{}], dtype=object))
    with pytest.raises(DataError, match="pickle"):
        read_npz(path)


def test_missing_files_and_unknown_endings(tmp_path):
    with pytest.raises(DataError, match="no file of device logs"):
        read_logs(tmp_path / "none.csv")
    with pytest.raises(InvalidInput, match="ending"):
        read_logs(tmp_path / "none.parquet")


FEDSCALE = {
    7: {"duration": 100, "inactive": [30, 60], "finish_time": 100, "active": [10, 30], "model": "phone"},
    9: {"duration": 50, "inactive": [5, 40], "finish_time": 50, "active": [20], "model": "tablet"},
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_fedscale_traces_are_read(tmp_path, protocol):
    path = tmp_path / "client_behave_trace"
    path.write_bytes(pickle.dumps(FEDSCALE, protocol=protocol))
    trace = replay(path, 2, round_seconds=1)
    on = np.array([trace.mask(t) for t in range(200)])
    # 10..30 and 30..60 without a gap, again after 100 s; from the start to 5, then 20..40, again after 50 s.
    assert list(np.flatnonzero(on[:, 0])) == [*range(10, 60), *range(110, 160)]
    assert list(np.flatnonzero(on[:100, 1])) == [*range(5), *range(20, 40), *range(50, 55), *range(70, 90)]


class Attack:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path):
    path, marker = tmp_path / "evil.pkl", tmp_path / "ran"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for payload in (Attack(marker), {1: {"active": [1], "inactive": [Attack(marker)], "finish_time": 5}}):
            path.write_bytes(pickle.dumps(payload, protocol=protocol))
            with pytest.raises(DataError, match="mkdir"):
                read_fedscale(path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())  # the same bytes do run in a plain unpickler
    assert marker.exists()


@pytest.mark.parametrize(
    "payload",
    [
        [1, 2],
        {},
        {1: [1]},
        {1: {"active": [1.5], "inactive": [2], "finish_time": 5}},
        {1: {"active": [True], "inactive": [2], "finish_time": 5}},
        {1: {"active": (1,), "inactive": [2], "finish_time": 5}},
        {1: {"active": [1], "inactive": [2]}},
        {1: {"active": [1], "inactive": [-2], "finish_time": 5}},
        collections.OrderedDict({1: {"active": [1], "inactive": [2], "finish_time": 5}}),
        {1: {"active": np.array([1]), "inactive": [2], "finish_time": 5}},
        {1: {"active": [1], "inactive": [{1, 2}], "finish_time": 5}},
    ],
)
def test_anything_but_plain_values_in_the_right_places_is_refused(tmp_path, payload):
    path = tmp_path / "odd.pkl"
    path.write_bytes(pickle.dumps(payload, protocol=2))
    with pytest.raises(DataError):
        read_fedscale(path)


def test_a_damaged_pickle_is_refused(tmp_path):
    path = tmp_path / "cut.pkl"
    whole = pickle.dumps(FEDSCALE)
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError):
            read_fedscale(path)


def test_flash_logs_are_read(tmp_path):
    lines = [
        "2020-01-28 18:00:00\tbattery_charged_on",
        "2020-01-28 18:10:00\twifi",
        "2020-01-28 18:20:00\tscreen_lock",
        "2020-01-28 18:25:00\t57.0%",
        "2020-01-28 18:30:00\t4G",
        "2020-01-29 00:00:00\tWIFI",
        "2020-01-29 01:00:00\tbattery_charged_off",
    ]
    path = tmp_path / "state_traces.json"
    path.write_text(json.dumps({"0": {"model": "m", "messages": "\n".join(lines)}, "1": {"messages": ""}}))
    trace = replay(path, 2, round_seconds=600)
    on = np.array([trace.mask(t) for t in range(144)])
    # The clock starts at midnight: 18:20 is round 110. The log is 25 h long, so it starts again after one day.
    assert list(np.flatnonzero(on[:, 0])) == [110]
    assert not on[:, 1].any()
    charging = replay(path, 2, round_seconds=600, requirements=["charging"])
    assert list(np.flatnonzero([charging.mask(t)[0] for t in range(144)])) == [*range(108, 144)]
    path.write_text(json.dumps({"0": {"messages": "yesterday\twifi"}}))
    with pytest.raises(DataError, match="message 1"):
        read_flash_json(path)
    path.write_text("{")
    with pytest.raises(DataError, match="not a JSON"):
        read_flash_json(path)
    path.write_text(json.dumps({"0": {"messages": 3}}))
    with pytest.raises(DataError, match="no text"):
        read_flash_json(path)


phones = pytest.mark.skipif(not PHONES.is_file(), reason="the phone trace (../shared/data) is not on this machine")


@phones
def test_the_phone_trace_has_its_known_statistics():
    trace = replay(PHONES, 300, round_seconds=60, series="charging_2state")
    masks = np.array([trace.mask(t) for t in range(6 * 1440)])  # six days of minutes
    rates = masks.mean(axis=0)
    assert rates.mean() == pytest.approx(0.161, abs=0.001)
    np.testing.assert_allclose(np.quantile(rates, [0.1, 0.5, 0.9]), [0.025, 0.128, 0.337], atol=0.002)
    np.testing.assert_allclose(trace.availability, rates, atol=0.01)
    together = masks.mean(axis=1)
    assert together.min() == pytest.approx(0.067, abs=0.001)
    assert together.max() == pytest.approx(0.260, abs=0.001)
    # t = 0 is 18:00 of the log's clock.
    by_hour = np.roll(together.reshape(6, 24, 60).mean(axis=(0, 2)), 18)
    assert (int(by_hour.argmax()), int(by_hour.argmin())) == (3, 12)
    assert by_hour.max() == pytest.approx(0.206, abs=0.002)
    assert by_hour.min() == pytest.approx(0.128, abs=0.002)


@phones
def test_the_phone_trace_keeps_its_statistics_when_resampled():
    few = replay(PHONES, 300, round_seconds=600, series="charging_2state")
    many = replay(PHONES, 5000, round_seconds=600, series="charging_2state", assignment="shuffle")
    assert set(many.shift_days) == set(range(6))
    day = range(6 * 144)
    rates = [np.mean([trace.mask(t).mean() for t in day]) for trace in (few, many)]
    assert rates[1] == pytest.approx(rates[0], abs=0.003)
    with pytest.raises(DataError, match="battery50_3state"):
        replay(PHONES, 300)
    evaluation = replay(PHONES, 300, series="battery50_3state", least_state=1)
    assert evaluation.availability.mean() > 2 * few.availability.mean()


def test_a_fedscale_session_of_no_length_is_none(tmp_path):
    path = tmp_path / "client_behave_trace"
    path.write_bytes(pickle.dumps({0: {"active": [10, 50], "inactive": [10, 60], "finish_time": 100}}))
    trace = replay(path, 1, round_seconds=1)
    assert [t for t in range(100) if trace.mask(t)[0]] == list(range(50, 60))
    assert trace.availability[0] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("round_hours", "offset_hours"), [(24, 0), (24, 12), (8, 1), (7, 0), (1, 0.5), (9.3, 0), (5, 2)]
)
def test_the_stated_truth_is_that_of_the_rounds(tmp_path, round_hours, offset_hours):
    """A device that is on for the first eight hours of the day: what rounds see of it depends on when they look."""
    path = tmp_path / "nights.csv"
    rows = [f"a,{day * 86400 + hour * 3600},{state}" for day in range(7) for hour, state in ((0, 2), (8, 0))]
    path.write_text("client,time,state\n" + "\n".join([*rows, "a,604800,0"]) + "\n")
    seconds = {"round_seconds": round_hours * 3600, "offset_seconds": offset_hours * 3600}
    trace = replay(path, 3, **seconds)
    seen = np.array([trace.mask(t) for t in range(5041)]).astype(float)
    np.testing.assert_allclose(trace.availability, seen[:-1].mean(axis=0), atol=2e-3)
    for client in range(3):
        moving = seen[:, client].std() > 0
        measured = np.corrcoef(seen[:-1, client], seen[1:, client])[0, 1] if moving else 0.0
        assert trace.correlation[client] == pytest.approx(measured, abs=5e-3)


def test_logs_go_to_the_clients_that_they_name(tmp_path):
    """Ten clients, listed in another order: client k is available in round k only."""
    path = tmp_path / "hospitals.csv"
    rows = [row for k in (7, 3, 9, 0, 1, 8, 2, 6, 4, 5) for row in (f"{k},0,0", f"{k},{k},2", f"{k},{k + 1},0")]
    path.write_text("client,time,state\n" + "\n".join([*rows, "0,10,0"]) + "\n")
    trace = availability.get("trace", path=str(path), round_seconds=1).start(crowd(10), seed=5)
    np.testing.assert_array_equal([trace.mask(t) for t in range(10)], np.eye(10, dtype=bool))
    np.testing.assert_allclose(trace.availability, 0.1)
    dealt = availability.get("trace", path=str(path), round_seconds=1, assignment="shuffle").start(crowd(10), seed=5)
    assert sorted(dealt.device) == list(range(10)) and not np.array_equal(dealt.device, trace.device)


def test_other_ids_are_matched_in_sorted_order_as_natural_numbers_owners(tmp_path):
    path = tmp_path / "names.csv"
    path.write_text("client,time,state\nwest,0,2\neast,0,0\nnorth,0,0\n")
    trace = availability.get("trace", path=str(path)).start(crowd(3), seed=0)
    owners, rows = np.unique(["west", "east", "north"], return_inverse=True)
    assert list(owners) == ["east", "north", "west"] and rows[0] == 2
    np.testing.assert_array_equal(trace.mask(0), [False, False, True])
    arrays = {"offsets": np.arange(4), "t": np.zeros(3), "state": np.array([2, 0, 0])}
    np.savez(tmp_path / "names.npz", **arrays, id=np.array(["west", "east", "north"]))
    trace = availability.get("trace", path=str(tmp_path / "names.npz")).start(crowd(3), seed=0)
    np.testing.assert_array_equal(trace.mask(0), [False, False, True])


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (["0", "1", "3"], "0 to 2: there is no client 3"),
        (["0", "2"], "client 1 has no log"),
        (["1", "2", "3"], "there is no client 3"),
        (["a", "b"], "3 clients need 3 ids. Got 2, the first 'a'"),
    ],
)
def test_ids_that_are_not_those_of_the_clients_are_refused(tmp_path, ids, says):
    path = tmp_path / "other.csv"
    path.write_text("client,time,state\n" + "".join(f"{name},0,2\n" for name in ids))
    with pytest.raises(InvalidInput, match=says) as refused:
        availability.get("trace", path=str(path)).start(crowd(3), seed=0)
    assert "assignment='shuffle'" in str(refused.value)
    assert availability.get("trace", path=str(path), assignment="shuffle").start(crowd(3), seed=0).mask(0).all()


def test_logs_without_ids_are_dealt_at_random_and_say_so_where_order_was_possible(tmp_path):
    path = tmp_path / "arrays.npz"
    np.savez(path, offsets=np.arange(21), t=np.zeros(20), state=np.full(20, 2))
    process = availability.get("trace", path=str(path))
    with pytest.warns(FedpickWarning, match="assignment='order' if device k is client k"):
        dealt = process.start(crowd(20), seed=4)
    asked = availability.get("trace", path=str(path), assignment="shuffle").start(crowd(20), seed=4)
    np.testing.assert_array_equal(dealt.device, asked.device)
    assert len(process.start(crowd(7), seed=4).device) == 7  # a sample of a population: no warning
    with pytest.raises(InvalidInput, match="needs logs with ids"):
        availability.get("trace", path=str(path), assignment="id").start(crowd(20), seed=4)


@phones
def test_the_published_spec_deals_the_phones_as_before():
    trace = availability.get("trace", path=str(PHONES), series="charging_2state").start(crowd(100), seed=0)
    np.testing.assert_array_equal(trace.device, trace_stream(0).permutation(300)[:100])


@pytest.mark.parametrize(
    "text",
    [
        "client,time,state\n0,21600,2\n0,43200,0\n",
        "Device ID,Timestamp,Online\n0,2024-05-01T06:00:00,1\n0,2024-05-01T12:00:00,0\n",
        "t,user,status\n2024-05-01 06:00,0,online\n2024-05-01 12:00,0,offline\n",
        "id,datetime,available,battery\n0,2024-05-01T06:00:00Z,True,90\n0,2024-05-01T14:00:00+02:00,False,80\n",
    ],
)
def test_other_columns_and_iso_timestamps_are_read(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_text(text)
    logs = read_csv(path)
    np.testing.assert_array_equal(logs.times, [21600, 43200])
    np.testing.assert_array_equal(logs.states, [2, 0])
    assert logs.ids == ("0",)
