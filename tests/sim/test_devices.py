"""Models of devices: published quantiles, correlations, files, bad values."""

from statistics import NormalDist

import numpy as np
import pytest
from scipy.stats import kstest, spearmanr

from fedpick.core.errors import DataError, FedpickError, InvalidInput, UnknownName
from fedpick.core.rng import Purpose
from fedpick.core.types import Clients
from fedpick.sim import devices
from fedpick.sim.devices import Fleet

MANY = Clients(num_examples=1.0 + np.arange(20_000) % 977)


def test_phones_have_the_published_quantiles():
    fleet = devices.get("phones").fleet(MANY, seed=0)
    score = 1774 * 0.005 / fleet.seconds_per_example
    assert np.quantile(score, [0.1, 0.5, 0.9]) == pytest.approx([786, 1774, 3489], rel=0.03)
    assert np.median(fleet.download) == pytest.approx(4.318e6, rel=0.03)
    assert (fleet.upload.min(), fleet.upload.max()) == (pytest.approx(0.431e6), pytest.approx(6.635e6))


def test_lognormal_devices_have_their_median_and_spread():
    fleet = devices.get("lognormal", seconds_per_example=0.2, spread=0.3).fleet(MANY, seed=1)
    assert np.median(fleet.seconds_per_example) == pytest.approx(0.2, rel=0.02)
    assert np.log(fleet.seconds_per_example).std() == pytest.approx(0.3, rel=0.02)


def test_classes_have_their_shares():
    fleet = devices.get("classes", seconds_per_example=[3, 1], shares=[0.25, 0.75]).fleet(MANY, seed=1)
    assert (fleet.seconds_per_example == 3).mean() == pytest.approx(0.25, abs=0.01)


def test_a_fleet_is_a_function_of_the_seed():
    model = devices.get("phones", jitter=0.3)
    one, again, other = (model.fleet(MANY, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.download, again.download) and not np.array_equal(one.download, other.download)
    some = np.array([5, 700])
    first, later = (one.seconds(round, some, 10, 1e6, 1e6).total for round in (3, 4))
    assert np.array_equal(first, again.seconds(3, some, 10, 1e6, 1e6).total) and not (first == later).any()
    # A client's time does not depend on the others.
    assert one.seconds(3, some[1:], 10, 1e6, 1e6).total[0] == first[1]


def _mixed(x):
    """`hashing._mix` with whole numbers."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_the_jitter_is_lognormal_and_that_of_a_loop_over_clients():
    """A disturbance is a quantile of the lognormal distribution, drawn by the hash of (seed, round, client)."""
    fleet = Fleet(
        seconds_per_example=np.ones(20_000), download=np.ones(20_000), upload=np.ones(20_000), jitter=0.3, seed=4
    )
    factors = fleet.seconds(7, np.arange(20_000), 1, 0, 0).computing
    high, low = (int(word) for word in np.random.SeedSequence(4, spawn_key=(int(Purpose.DEVICES), 7)).generate_state(2))
    for client in range(0, 20_000, 997):
        place = _mixed(_mixed((client + high) % 2**32) ^ low) >> 16
        assert factors[client] == pytest.approx(np.exp(0.3 * NormalDist().inv_cdf((place + 0.5) / 2**16)))
    scores = np.sort(np.log(factors) / 0.3)
    assert kstest(scores, "norm").pvalue > 0.01


def test_seconds_are_the_sum_of_the_parts():
    fleet = Fleet(seconds_per_example=[0.5, 2.0], download=[10, 20], upload=[5, 10])
    spent = fleet.seconds(0, np.array([1, 0]), np.array([3, 4]), bytes_down=np.array([100, 0]), bytes_up=50)
    assert [part.tolist() for part in spent] == [[5, 0], [6, 2], [5, 10]]
    assert spent.total.tolist() == [16, 12]


@pytest.mark.parametrize("rho", [-0.9, 0.0, 0.6])
@pytest.mark.parametrize("name", ["phones", "lognormal", "csv"])
def test_speeds_follow_the_size(name, rho, tmp_path):
    options = {"path": _csv(tmp_path, np.exp(np.linspace(-5, 0, 300)))} if name == "csv" else {}
    fleet = devices.get(name, correlated_with="size", correlation=rho, **options).fleet(MANY, seed=0)
    found = spearmanr(1 / fleet.seconds_per_example, MANY.num_examples).statistic
    assert found == pytest.approx(6 / np.pi * np.arcsin(rho / 2), abs=0.03)


def test_speeds_follow_the_availability():
    model = devices.get("phones", correlated_with="availability", correlation=1.0)
    clients = Clients(num_examples=np.ones(3), availability=np.array([0.5, 0.1, 0.9]))
    assert np.argsort(model.fleet(clients, 0).seconds_per_example).tolist() == [2, 0, 1]
    with pytest.raises(InvalidInput, match="needs the true availability"):
        model.fleet(MANY, 0)


def _csv(folder, speeds):
    path = folder / "devices.csv"
    lines = [f"phone,{1e6 + index},{2e6},{speed}" for index, speed in enumerate(speeds)]
    path.write_text("model,download,upload,seconds_per_example\n" + "\n".join(lines) + "\n")
    return str(path)


def test_a_file_with_a_line_for_every_client(tmp_path):
    model = devices.get("csv", path=_csv(tmp_path, [0.3, 0.1, 0.2]))
    fleet = model.fleet(Clients(num_examples=np.ones(3)), seed=0)
    assert fleet.seconds_per_example.tolist() == [0.3, 0.1, 0.2]
    assert fleet.download.tolist() == [1e6, 1e6 + 1, 1e6 + 2]
    drawn = model.fleet(MANY, seed=0)
    assert np.unique(drawn.seconds_per_example, return_counts=True)[1] == pytest.approx(20_000 / 3, rel=0.05)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("download,upload\n1,2\n", "lacks 'seconds_per_example'"),
        ("seconds_per_example,download,upload\n0.1,5,0\n", "devices.csv:2: speeds and links must be numbers above 0"),
        ("seconds_per_example,download,upload\n\n0.1,5,x\n", "devices.csv:3"),
        ("seconds_per_example,download,upload\n0.1,5\n", "devices.csv:2"),
        ("seconds_per_example,download,upload\n", "holds no device"),
        ("", "lacks"),
        (None, "cannot be read"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, problem):
    path = tmp_path / "devices.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=problem):
        devices.get("csv", path=str(path)).fleet(MANY, seed=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("phones", {"seconds_per_example": 0}),
        ("phones", {"jitter": -1}),
        ("phones", {"correlation": 2}),
        ("phones", {"correlated_with": "weight"}),
        ("phones", {"spread": 1}),
        ("lognormal", {"download": -5.0}),
        ("lognormal", {"spread": np.nan}),
        ("classes", {"seconds_per_example": [1, 2], "shares": [0.5, 0.5]}),
        ("classes", {"seconds_per_example": [2, 0], "shares": [0.5, 0.5]}),
        ("classes", {"seconds_per_example": [2, 1], "shares": [0.5, 0.4]}),
        ("classes", {"seconds_per_example": [], "shares": []}),
        ("csv", {}),
        ("csv", {"path": ""}),
    ],
)
def test_bad_values_are_refused(name, options):
    with pytest.raises(InvalidInput) as found:
        devices.get(name, **options)
    assert "\n" not in str(found.value)


def test_bad_fleets_and_names_are_refused():
    with pytest.raises(InvalidInput, match=r"Fleet\.upload must be a finite number above 0 .* client 1 has 0"):
        Fleet(seconds_per_example=[1, 1], download=[1, 1], upload=[1, 0])
    with pytest.raises(UnknownName, match="Did you mean 'phones'"):
        devices.get("phone")
    assert issubclass(UnknownName, FedpickError)
    assert all(devices.summary(name) for name in devices.names())
