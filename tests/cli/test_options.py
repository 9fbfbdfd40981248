from __future__ import annotations

import pytest

from fedpick.cli.options import names_list, numbers_list, seeds_option, settings_list
from fedpick.core.errors import InvalidInput


def test_lists_between_commas():
    assert names_list(" fedcor, uniform,") == ["fedcor", "uniform"]
    assert numbers_list("0.6, 0.7,", "--targets") == [0.6, 0.7]
    assert names_list(None) is numbers_list(None, "--targets") is None
    with pytest.raises(InvalidInput, match="at least one name"):
        names_list(" , ")
    with pytest.raises(InvalidInput, match=r"--targets must be numbers .* Got '0\.6;0\.7'"):
        numbers_list("0.6;0.7", "--targets")


def test_seeds_are_a_number_or_a_list():
    assert seeds_option("3") == 3
    assert seeds_option("7,") == [7]
    assert seeds_option("1,2,5") == [1, 2, 5]
    assert seeds_option(None) is None


def test_settings_are_toml_values_or_words():
    texts = ["partition.alpha=0.3", "partition.name=dirichlet", "run.targets=[0.6, 0.7]", 'data.path="a=b"']
    assert settings_list(texts) == {
        "partition": {"alpha": 0.3, "name": "dirichlet"},
        "run": {"targets": [0.6, 0.7]},
        "data": {"path": "a=b"},
    }
    nested = settings_list(["policies.pow-d.num_candidates=8", "policies.pow-d.local.lr=1"])
    assert nested == {"policies": {"pow-d": {"num_candidates": 8, "local": {"lr": 1}}}}
    for wrong in ("alpha=1", "partition.alpha", "partition.=1", "partition.a.=1"):
        with pytest.raises(InvalidInput, match=r"section\.key=value"):
            settings_list([wrong])
    for both in (["local.lr=1", "local.lr.initial=2"], ["local.lr.initial=2", "local.lr=1"]):
        with pytest.raises(InvalidInput, match="to a value and to a table of values"):
            settings_list(both)
