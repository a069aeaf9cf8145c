"""A disk that refuses a call ends a run with a sentence, and with nothing that a resume cannot use.

The cases are made from the calls of a run that nothing stops, and of one that is resumed: each kind
of file that it touches, by each call, each error, at the first and the third time, with a fast and
a slow fsync. Once the disk is well again the run goes on, and ends as the
unbroken one: leaderboard, lineage, and every adapter and moment to the bit. `make torture-io` tries
all of them, `make test` a sample.
"""

import random
import shutil

import pytest
from faults import Unbroken
from torture_table import tried

from evo_grpo.errors import EvoGrpoError

SETTINGS = {
    "population__size": 2,
    "record__checkpoints": "last",
    "evolve__archive": True,
    "algorithm__separate_reference": True,
}
SHARES = 8
"""Parts of the cases, each a test, so that workers have equally much to do."""
SAMPLE = 8


@pytest.fixture(scope="module", params=["a run", "a resume"])
def unbroken(tmp_path_factory, request):
    top = tmp_path_factory.mktemp("unbroken")
    return Unbroken(SETTINGS, top, resumed=request.param == "a resume")


def strike(unbroken, case, tmp_path):
    """Try a case in a folder that is removed afterwards."""
    top = tmp_path / "top"
    top.mkdir()
    try:
        return unbroken.strike(case, top)
    except EvoGrpoError as error:
        return f"{case}: does not go on: {error}"
    finally:
        shutil.rmtree(top)


@pytest.mark.slow
def test_a_sample_of_the_faults_costs_no_run(unbroken, tmp_path):
    cases = random.Random(1).sample(unbroken.cases, SAMPLE)
    assert [wrong for case in cases if (wrong := strike(unbroken, case, tmp_path))] == []


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("share", range(SHARES))
def test_no_fault_costs_a_run(unbroken, tmp_path, share):
    cases = unbroken.cases[share::SHARES]
    assert [wrong for case in cases if (wrong := strike(unbroken, case, tmp_path))] == []
    tried("a call of the disk refused: ENOSPC, EIO, EACCES or EROFS",
          "a run" if unbroken.begun is None else "a resume", len(cases))  # fmt: skip
