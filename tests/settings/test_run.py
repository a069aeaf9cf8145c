"""What depends on the length of a run, filled in once: decisions, places and evaluations."""

import pytest
import yaml

from evo_grpo.errors import ConfigError
from evo_grpo.settings import from_dict
from evo_grpo.settings.yaml import from_written

MINIMAL = {"model": "tiny-sums", "env": "sums"}


def settled(*overrides, rounds=24):
    return from_dict(MINIMAL, [f"population.rounds={rounds}", *overrides]).settled(8)


def between(*overrides):
    return settled(*overrides).evolve.fitness.between


@pytest.mark.parametrize(
    ("overrides", "decisions", "sizes"),
    [
        ([], [6, 12, 18, 24], [*[8] * 6, *[4] * 6, *[2] * 12]),
        # Agents that begin alike become different after the first round, and all of them stay.
        (["population.init=same"], [1, 6, 12, 18, 24], [*[8] * 6, *[4] * 6, *[2] * 12]),
        (["population.init=same", "population.size=1", "evolve.selection=none"],
         [6, 12, 18, 24], "constant"),
        # A selection that removes nobody.
        (["evolve.selection=none"], [6, 12, 18, 24], "constant"),
        (["population.sizes=constant"], [6, 12, 18, 24], "constant"),
        (["population.size=2"], [6, 12, 18, 24], "constant"),
        # Where given sizes shrink, a decision says who leaves.
        (["population.sizes=[8, 8, 6, 5]"], [2, 3, 6, 12, 18, 24], [8, 8, 6, 5]),
        (["population.decisions=[3, 5, 9, 24]"], [3, 5, 9, 24],
         [*[8] * 3, *[4] * 2, *[2] * 19]),
        (["population.decisions=every"], list(range(1, 25)), [8, 4, 2, 2]),
    ],
)  # fmt: skip
def test_a_run_records_when_it_decides_and_how_many_agents_play(overrides, decisions, sizes):
    population = settled(*overrides).population
    assert (population.decisions, population.sizes) == (decisions, sizes)


def test_what_is_filled_in_stays_when_a_run_gets_more_rounds():
    for given in ([], ["population.init=same"], ["population.decisions=every"]):
        first = settled(*given, rounds=8)
        longer = first.replace(population=first.population.replace(rounds=20))
        assert longer.settled(8) == longer
        assert settled(*given, rounds=20) != longer, "another run"


def test_where_agents_train_as_fitness_measures_rounds_in_between_evaluate_nobody():
    assert between() == 0
    assert between("algorithm.temperature=0.7", "evolve.fitness.temperature=0.7") == 0
    # The length of completions is that of training, and so is the prompt of all agents.
    assert between("algorithm.max_output_tokens=5") == 0


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"algorithm.{one}"] for one in ("temperature=0.7", "top_p=0.9", "top_k=5", "min_p=0.1")),
        ["algorithm.repetition_penalty=1.1"],
        ["evolve.fitness.temperature=0.7"],
        ["evolve.hyperparameters.temperature={min: 0.5, max: 1.5}"],
        ["evolve.hyperparameters.top_p={min: 0.5, max: 1.0}"],
        ["evolve.hyperparameters.max_output_tokens={choices: [2, 4]}"],
        ["evolve={selection: pareto, fitness: {objectives: [fitness, {name: tokens, direction: "
         "minimize}]}}"],
        ["population={size: 2, rounds: 24, init: [{}, {temperature: 0.9}]}"],
    ],
)  # fmt: skip
def test_where_training_is_another_measure_eight_prompts_are_answered(overrides):
    assert between(*overrides) == 8
    few = [*overrides, "evolve.fitness.prompts=5"]
    assert between(*few) == 5, "no more than after a decision"


@pytest.mark.parametrize("rule", ["patience=2", "fitness=0.9"])
def test_a_rule_that_reads_the_fitness_of_every_round_gets_it_whole(rule):
    assert between(f"population.stop.{rule}", "evolve.fitness.prompts=40") == 40
    assert between("population.stop.minutes=5", "evolve.fitness.prompts=40") == 0


def test_a_number_of_ones_own_stays():
    for number in (0, 3, 500):
        given = f"evolve.fitness.between={number}"
        assert between(given, "algorithm.temperature=0.7") == number
    fitness = settled("evolve.fitness.between=500", "evolve.fitness.prompts=40").evolve.fitness
    assert fitness.in_between == 40, "never more than after a decision"


@pytest.mark.parametrize(
    ("share", "prompts"),
    # 24,576 completions in training. A prompt costs those of 8, 4, 2 and 2 agents, and two of each
    # of two finalists: 20. An archive adds three times two, and two as a finalist.
    [("null", 64), (0.5, 64), (0.05, 61), (0.02, 24), (1e-9, 8)],
)
def test_evaluations_take_no_more_than_their_share(share, prompts):
    given = f"evolve.fitness.share={share}"
    assert settled(given).evolve.fitness.prompts == prompts
    fewer = settled(given, "evolve.archive=true").evolve.fitness.prompts
    assert fewer == (prompts if prompts in (8, 64) else prompts * 20 // 28)


def test_a_share_never_adds_prompts_and_counts_those_of_rounds_in_between():
    assert (
        settled("evolve.fitness.share=1e-9", "evolve.fitness.prompts=5").evolve.fitness.prompts == 5
    )
    # Of 1,228 completions, 20 rounds in between take 8 prompts of 8, 4 and 2 agents: 640.
    given = ["evolve.fitness.share=0.05", "evolve.fitness.between=8"]
    assert settled(*given).evolve.fitness.prompts == 29
    # Where rounds in between take all prompts, they take as few: 20 and 92 answers to each.
    rule = [given[0], "population.stop.patience=3"]
    assert settled(*rule).evolve.fitness.prompts == 1228 // (20 + 5 * 8 + 5 * 4 + 10 * 2)


def test_shares_are_those_of_the_rounds_that_a_limit_of_tokens_leaves():
    def decisions(tokens, output=8, rounds=24):
        # Eight agents sample 4 prompts of 8 completions in 4 steps: 1024 completions in a round.
        given = [f"population.rounds={rounds}", f"population.stop.tokens={tokens}"]
        config = from_dict(MINIMAL, given).settled(output)
        assert config.population.rounds == rounds
        return config.population.decisions

    assert decisions(8 * 1024 * 8) == [2, 4, 6, 8]
    assert decisions(8 * 1024 * 4, output=4) == [2, 4, 6, 8]
    assert decisions(1) == [1]
    assert decisions(1e9) == [6, 12, 18, 24]


@pytest.mark.parametrize(("shards", "parts"), [("null", 2), (3, 6)])
def test_a_written_number_of_parts_of_each_shard_becomes_their_product(shards, parts):
    text = f"model: tiny-sums\nenv: sums\nengine: {{overlap: 2, shards: {shards}}}"
    engine = from_written(text, "population.yaml").engine
    assert (engine.shards, engine.overlap) == (parts, True)


@pytest.mark.parametrize(("rollout", "stop"), [("vllm", ["</a>"]), ("native", [])])
def test_stop_sequences_of_an_earlier_run_are_read_as_stops(rollout, stop):
    engine = {"rollout": rollout, "vllm": {"stop_sequences": ["</a>"]}}
    settings = {"model": "tiny-sums", "env": "sums", "engine": engine}
    assert from_written(yaml.safe_dump(settings), "population.yaml").algorithm.stop == stop
    with pytest.raises(ConfigError, match=r"stop_sequences: .*algorithm.stop serves every engine"):
        from_dict(settings)
