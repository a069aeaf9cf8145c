"""A run and Python say which splits have fewer rows than the settings ask for, as check does."""

import pytest
from small_run import small

from evo_grpo import GRPO, run
from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.settings import DoubtfulSetting

FEW = {"high": 20, "validation_size": 5, "test_size": 4}


def said(caught):
    return [str(one.message) for one in caught if one.category is DoubtfulSetting]


def test_a_run_warns_as_check_does(tmp_path):
    config = small(env__args=FEW, population__rounds=1, engine__threads=1)
    with pytest.warns(DoubtfulSetting) as caught:
        run(config, out=tmp_path / "run")
    assert said(caught) == list(make_plan(config).warnings)
    few = [text for text in said(caught) if text.startswith("evolve.fitness")]
    assert few == [
        "evolve.fitness.prompts is 6, but validation has 5 rows: selection uses only these; add "
        "rows, or take more samples of each with evolve.fitness.samples",
        "evolve.fitness.test_prompts is 6, but test has 4 rows: the final result uses only these; "
        "add rows, or take more samples of each with evolve.fitness.test_samples",
    ]


def test_train_warns_of_the_rows_that_it_uses():
    population = GRPO.population(size=2, model="tiny-sums", device="cpu", group_size=2)
    with pytest.warns(DoubtfulSetting) as caught:
        population.train(
            {"kind": "sums", "args": FEW}, rounds=1, steps_per_round=1, fitness={"prompts": 6}
        )
    # The test split is not used without a run folder.
    assert [text.partition(":")[0] for text in said(caught)] == [
        "evolve.fitness.prompts is 6, but validation has 5 rows"
    ]
