"""Stop strings and tokens on another device: completions are cut where one row alone is cut."""

import pytest
from stop_cases import check

pytestmark = pytest.mark.device


def test_completions_are_cut_where_one_row_alone_is_cut(device, monkeypatch):
    assert sum(check(seed, monkeypatch, device) for seed in range(1000, 1100)) > 120
