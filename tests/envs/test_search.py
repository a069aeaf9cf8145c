"""What agents search by name: a prompt of `env.prompts`, and the weight of a reward function."""

import json
import math
from pathlib import Path

import jsonschema
import numpy as np
import optuna
import pytest
from numpy.testing import assert_array_equal
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from small_run import Told, outcome, small, stopped_and_resumed

from evo_grpo import (
    GRPO,
    DatasetEnv,
    ReasoningGym,
    RLParameter,
    compare,
    evaluate_adapter,
    export,
    leaderboard,
    replay,
    resume,
    run,
    sample,
    write_report,
)
from evo_grpo.envs.asking import asking
from evo_grpo.envs.describing import environment_parts
from evo_grpo.envs.registry import build_multi_turn, build_task
from evo_grpo.envs.rewards.weights import fitness_rewards
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.population.evaluate import weighted
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.steering import ask
from evo_grpo.settings import EnvConfig, json_schema

SUMS = {"kind": "sums", "args": {"high": 20}}
LR = {"lr": {"min": 1e-4, "max": 1e-2}}
PROMPTS = {"plain": {}, "swapped": {"prompt": "{b}+{a}="}, "zero": {"prompt": "0+{a}+{b}="}}
TWO = {**SUMS, "reward": ["two_rewards:exact", "two_rewards:last"]}
FITNESS = {
    "reward": "exact",
    **{"prompts": 6, "test_prompts": 6, "test_samples": 2, "final_samples": 0},
}
ALONE = {"population__size": 1, "evolve__selection": "none", "evolve__exploration": "none"}
SHORT = {
    **{"rounds": 1, "steps_per_round": 1, "progress": False},
    "fitness": {"prompts": 4, "test_prompts": 3},
}
ROWS = [{"question": f"{n:02d}+01=", "answer": f"{n + 1:03d}"} for n in range(30)]
QUESTIONS = [{"question": f"What is {n}?", "answer": str(n)} for n in range(20)]


def exact(completion, answer):
    return float(completion == answer)


def named(**changes):
    searched = {"prompt": {"choices": ["plain", "swapped", "zero"]}}
    env = {**SUMS, "prompts": PROMPTS}
    return small(**{"env": env, "evolve__hyperparameters": searched, **changes})


def two(**changes):
    searched = {"reward_weights.last": {"min": 0.1, "max": 2.0}}
    given = {"evolve__hyperparameters": searched, "evolve__fitness": FITNESS}
    return small(**{"env": TWO, **given, **changes})


def digests(folder):
    return [agent.adapter_sha256 for record in read_rounds(folder) for agent in record.agents]


# --- both ---------------------------------------------------------------------------------------


def value_of(hparams, name):
    return hparams.prompt if name == "prompt" else hparams.reward_weights["last"]


def allowed(value):
    return value in PROMPTS if isinstance(value, str) else 0.1 <= value <= 2.0


both = pytest.mark.parametrize(
    ("config", "name"), [(named, "prompt"), (two, "reward_weights.last")], ids=["prompt", "weight"]
)


@both
def test_a_resumed_search_ends_as_one_that_was_not_stopped(config, name, tmp_path):
    settings = config(evolve__exploration={"kind": "mutate", "no_mutation": 0})
    whole = run(settings, out=tmp_path / "whole")
    stopped = stopped_and_resumed(settings, tmp_path / "stopped", ("learn", 1))
    assert outcome(whole) == outcome(stopped)
    changes = [m.mutation.changes for record in read_rounds(whole) for m in record.members]
    moved = [one[name] for one in changes if name in one]
    assert moved
    assert all(allowed(old) and allowed(new) and old != new for old, new in moved)


@both
@pytest.mark.parametrize("exploration", ["resample", "optuna"])
def test_every_exploration_proposes_what_the_range_allows(config, name, exploration, tmp_path):
    folder = run(config(evolve__exploration=exploration), out=tmp_path / "run")
    for record in read_rounds(folder):
        assert all(allowed(value_of(hparams, name)) for hparams in record.next_hparams)


@pytest.mark.slow
@both
def test_what_reads_a_run_and_trains_beside_it_takes_it(config, name, tmp_path):
    folder = run(config(), out=tmp_path / "run")
    journal = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    study = optuna.load_study(study_name=None, storage=journal)
    assert all(allowed(trial.params[name]) for trial in study.trials)
    if name == "prompt":
        assert set(study.trials[0].distributions["prompt"].choices) == set(PROMPTS)
    shown = "swapped" if name == "prompt" else name
    assert shown in Path(write_report(folder, tmp_path / "report.html")).read_text()
    arms = compare(folder)["arms"]
    assert {arm["name"] for arm in arms} == {"guess", "random", "evolved"}
    assert all(0 <= arm["test"]["mean"] <= 1 for arm in arms)
    assert 0 <= replay(folder).training("schedule-run").test.mean <= 1


@pytest.mark.parametrize(
    ("config", "value", "wrong"),
    [
        (
            named,
            {"prompt": "swapped"},
            [({"prompt": "swaped"}, "expected one of plain, swapped, zero, got swaped")],
        ),
        (
            two,
            {"reward_weights.last": 1.5},
            [
                ({"reward_weights.lst": 1.0}, "did you mean 'reward_weights"),
                ({"reward_weights.last": 3.0}, "inside of its range"),
            ],
        ),
    ],
    ids=["prompt", "weight"],
)
def test_it_is_set_by_hand(config, value, wrong, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(config(population__rounds=2), out=folder, observer=Told(("learn", 0)))
    for values, message in wrong:
        with pytest.raises(ConfigError, match=message):
            ask(folder, "set", agent=0, values=values)
    ask(folder, "set", agent=0, values=value)
    resume(folder)
    ((name, expected),) = value.items()
    assert value_of(read_rounds(folder)[1].agents[0].hparams, name) == expected


@pytest.mark.parametrize(
    ("config", "changes", "text"),
    [
        (
            named,
            {"evolve__hyperparameters": {"prompt": {"choices": ["plain", "swaped"]}}},
            "evolve.hyperparameters.prompt.choices: expected one of env.prompts: plain, swapped, "
            "zero, got 'swaped'; did you mean 'swapped'?",
        ),
        (
            named,
            {"env": SUMS},
            "prompt.choices: expected one of env.prompts: none, got 'plain'; add it there",
        ),
        (
            named,
            {"evolve__hyperparameters": {"prompt": {"min": 0, "max": 1}}},
            "evolve.hyperparameters.prompt: expected choices, a list of possible values",
        ),
        (
            named,
            {"evolve__hyperparameters": {"prompt": {"choices": ["plain", "plain"]}}},
            "prompt.choices: expected each choice once, got",
        ),
        (
            named,
            {"evolve__hyperparameters": {"prompt": {"choices": [1, 2]}}},
            "prompt.choices: expected names, which values of prompt are, got a list ([1, 2])",
        ),
        (
            named,
            {"population__init": [{"prompt": "plain"}, {"prompt": "no"}, {}]},
            "population.init[1].prompt: expected one of plain, swapped, zero, got no",
        ),
        (
            named,
            {"env": {**SUMS, "prompts": {"a": {"prompt": "{c}"}}}, "evolve__hyperparameters": LR},
            'no column "c", which env.prompts.a needs',
        ),
        (
            named,
            {"env": {**SUMS, "prompts": {"a": "Be brief."}}, "evolve__hyperparameters": LR},
            "env.prompts.a.system_prompt: expected messages for the chat template, got the raw",
        ),
        (
            named,
            {"env": {**SUMS, "prompts": {"a": {"promt": "{a}"}}}},
            "env.prompts.a.promt: unknown key; did you mean 'prompt'?",
        ),
        (
            named,
            {"env": {**SUMS, "prompts": {}}},
            "env.prompts: expected a mapping of at least one name to a prompt",
        ),
        (
            named,
            {
                "env": {
                    **SUMS,
                    "prompts": {
                        "a": {"prompt": "{a}", "conversation": [{"role": "user", "content": "{a}"}]}
                    },
                }
            },
            "env.prompts.a: expected prompt or conversation, got both; remove one",
        ),
        (
            two,
            {"evolve__hyperparameters": {"reward_weights.lst": {"min": 0, "max": 1}}},
            "reward_weights.lst: expected a reward function of the task, exact, last, got "
            "'lst'. Did you mean \"last\"?",
        ),
        (
            two,
            {"env": {**TWO, "reward_weights": [1, 5]}},
            "env.reward_weights: expected a value inside of its range [0.1, 2] as the weight of "
            "'last', got 5",
        ),
        (
            two,
            {"evolve__fitness": {**FITNESS, "reward": "exakt"}},
            "evolve.fitness.reward: expected a reward function of the task, exact, last, got "
            "'exakt'. Did you mean \"exact\"?",
        ),
        (
            two,
            {"evolve__fitness": {**FITNESS, "reward": None}},
            "evolve.fitness.reward: expected a measure that does not depend on reward_weights.last",
        ),
        (
            two,
            {"evolve__fitness": {**FITNESS, "reward": {"exact": 0}}},
            "evolve.fitness.reward: expected the name of a reward function, or a mapping of names",
        ),
        (
            two,
            {"env": {**TWO, "reward_weights": {"lst": 1}}},
            "reward_weights: expected a reward function of the task, exact, last, got 'lst'",
        ),
        (
            two,
            {"env": {**TWO, "reward_weights": [0, 0]}},
            "env.reward_weights: expected one number per reward function, not all of them 0",
        ),
        (
            two,
            {"env": {**TWO, "reward_weights": {"exact": 0, "last": 0.0}}},
            "reward_weights: expected one that is not 0, got 0 for each of exact, last",
        ),
        (
            two,
            {"evolve__hyperparameters": {"reward_weights.last": {"min": 0, "max": 1e300}}},
            "reward_weights.last.max: expected",
        ),
        (
            two,
            {"evolve__hyperparameters": {"reward_weights.": {"min": 0, "max": 1}}},
            "nothing of that name can mutate",
        ),
    ],
)
def test_a_wrong_one_is_named_before_anything_is_loaded(
    config, changes, text, tmp_path, monkeypatch
):
    monkeypatch.setattr("evo_grpo.training.assemble.build_cohort", None)
    with pytest.raises((ConfigError, DataError)) as raised:
        run(config(**changes), out=tmp_path / "run")
    assert text in str(raised.value)


# --- prompts ------------------------------------------------------------------------------------


def two_agents(*prompts):
    ranges = {"prompt": RLParameter(choices=list(prompts))}
    return GRPO.population(
        size=2, model="tiny-sums", device="cpu", hyperparameters=ranges, group_size=4
    )


def test_an_agent_trains_and_is_judged_under_its_own_prompt(tmp_path):
    own = run(named(**ALONE, population__init=[{"prompt": "swapped"}]), out=tmp_path / "own")
    as_prompt = {"env": {**SUMS, "prompt": "{b}+{a}="}, "evolve__hyperparameters": {}}
    fixed = run(named(**ALONE, **as_prompt), out=tmp_path / "fixed")
    plain = run(named(**ALONE, population__init=[{"prompt": "plain"}]), out=tmp_path / "plain")
    assert digests(own) == digests(fixed) != digests(plain)
    scores = [read_rounds(folder)[-1].agents[0].score for folder in (own, fixed, plain)]
    assert scores[0] == scores[1] != scores[2]


def test_without_a_search_all_agents_have_the_first_prompt(tmp_path):
    nothing = {"evolve__hyperparameters": LR}
    with pytest.warns(UserWarning, match="of which all agents have the first: search them with"):
        several = run(named(**nothing), out=tmp_path / "several")
    one = run(named(**nothing, env=SUMS), out=tmp_path / "one")
    assert outcome(several) == outcome(one)


def test_each_prompt_has_its_share_of_the_first_population(tmp_path):
    folder = run(named(population__rounds=1), out=tmp_path / "run")
    agents = read_rounds(folder)[0].agents
    assert agents[0].hparams.prompt == "plain"
    assert {agent.hparams.prompt for agent in agents} == set(PROMPTS)
    table = leaderboard(folder)
    assert set(table["prompt"]) == set(PROMPTS)
    assert "swapped" in (folder / "leaderboard.csv").read_text()


def test_the_winner_is_exported_and_asked_with_its_prompt(tmp_path):
    alone = {"population__size": 1, "population__rounds": 1, "evolve__selection": "none"}
    folder = run(named(**alone, population__init=[{"prompt": "swapped"}]), out=tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    assert evaluate_adapter(folder).own.mean == summary["best"]["mean"]
    asked, _ = sample(folder, rows=[0], n=1)
    row = build_task(EnvConfig(**SUMS), 3).splits["validation"][0]
    assert asked.prompt == f"{row['b']}+{row['a']}="
    made = export(folder, out=tmp_path / "export", anyway=True)
    assert json.loads((made / "export.json").read_text())["prompt"] == "swapped"
    card = (made / "README.md").read_text()
    assert "prompt: swapped, of env.prompts of the run" in card
    with pytest.warns(UserWarning, match="trained with the prompt 'swapped', which env.prompts"):
        evaluate_adapter(made, small(env=SUMS))
    judged = evaluate_adapter(made, folder / "population.yaml")
    assert judged.own.mean == summary["best"]["mean"]


def test_a_population_from_python_searches_prompts(tmp_path):
    env = DatasetEnv(
        ROWS, exact, prompt="{question}", prompts={"a": {}, "b": {"prompt": "0{question}"}}
    )
    population = two_agents("a", "b")
    with pytest.raises(ConfigError, match=r"choices: expected one of env\.prompts: none, got 'a'"):
        population.train("sums", **SHORT)
    population.train(env, **SHORT, out=tmp_path / "run")
    (record,) = read_rounds(tmp_path / "run")
    assert [agent.hparams.prompt for agent in record.agents] == ["a", "b"]


def test_an_environment_object_keeps_its_prompts_in_the_record(tmp_path):
    population = two_agents("b", "a")

    def gym(other):
        return ReasoningGym(
            ROWS,
            ROWS[:6],
            population[0].cohort.base.tokenizer,
            exact,
            "{question}",
            prompts={"a": {}, "b": {"prompt": other}},
        )

    population.train(gym("0{question}"), **SHORT, out=tmp_path / "run")
    (record,) = read_rounds(tmp_path / "run")
    assert [agent.hparams.prompt for agent in record.agents] == ["b", "a"]
    assert environment_parts(gym("0{question}"), 0) != environment_parts(gym("1{question}"), 0)
    folder = tmp_path / "run"
    asked, _ = sample(folder, ["07+01="], agent=0, n=1)
    assert asked.prompt == "007+01="


def test_a_named_prompt_is_a_system_message_or_a_template_of_its_own():
    env = EnvConfig(
        kind="dataset",
        train=QUESTIONS,
        reward="two_rewards:exact",
        few_shot={"rows": [{"question": "What is 1?", "answer": "1"}], "answer": "{answer}"},
        prompts={
            "brief": "Be brief.",
            "none": {},
            "own": {"conversation": [{"role": "user", "content": "{question} Think."}]},
        },
    )
    row = {"question": "What is 7?"}
    example = {"role": "assistant", "content": "1"}

    def messages(name):
        return asking(env, 0, name).template.messages(row)

    brief = messages("brief")
    assert brief[0] == {"role": "system", "content": "Be brief."}
    assert messages(None) == brief
    assert messages("none") == brief[1:]
    assert messages("none")[1] == example
    assert messages("own")[-1]["content"] == "What is 7? Think."
    assert messages("own")[0]["content"] == "What is 1? Think."


def test_prompts_of_one_row_are_the_same_row_under_each_name(tokenizer):
    gym = ReasoningGym(
        QUESTIONS,
        QUESTIONS[:4],
        tokenizer,
        exact,
        "Q: {question}",
        prompts={"q": {}, "a": {"prompt": "{answer}? {question}"}},
    )
    for split in ("train", "validation", "test"):
        first = gym.prompts(split)
        other = gym.under("a", first)
        assert [one.columns for one in other] == [one.columns for one in first]
        assert all(
            one.text == f"{one.columns['answer']}? {one.columns['question']}" for one in other
        )
        assert gym.under("q", first) == first


def test_an_episode_has_no_prompts_by_name():
    env = EnvConfig(kind="python:games:make", prompts={"a": "Be brief."})
    with pytest.raises(ConfigError, match=r"env\.prompts"):
        build_multi_turn(env, 0)


def test_the_schema_takes_a_system_prompt_as_a_string():
    check = jsonschema.Draft202012Validator(json_schema()).validate
    settings = {"model": "tiny-sums", "env": {"kind": "sums", "prompts": {"a": "Be brief."}}}
    check(settings)
    ranges = {"prompt": {"choices": ["a"]}, "lr": {"min": 1e-4, "max": 1e-2}}
    check({**settings, "evolve": {"hyperparameters": ranges}})
    with pytest.raises(jsonschema.ValidationError):
        check({**settings, "evolve": {"hyperparameters": {"lr": {"max": 1e-2}}}})


# --- weights of rewards -------------------------------------------------------------------------


def test_an_agent_learns_from_its_own_weights_as_from_those_of_the_environment(tmp_path):
    start = [{"reward_weights.last": 0.3}]
    own = run(two(**ALONE, population__init=start), out=tmp_path / "own")
    fixed = {**TWO, "reward_weights": {"last": 0.3}}
    of_env = {"env": fixed, "evolve__hyperparameters": {}}
    other = run(two(**ALONE, **of_env), out=tmp_path / "fixed")
    without = run(two(**ALONE, evolve__hyperparameters={}), out=tmp_path / "ones")
    assert digests(own) == digests(other) != digests(without)
    rewards = [
        [agent.metrics["reward"] for record in read_rounds(folder) for agent in record.agents]
        for folder in (own, other)
    ]
    assert rewards[0] == rewards[1]


def test_the_first_agent_begins_with_the_weights_of_the_environment(tmp_path):
    folder = run(two(env={**TWO, "reward_weights": [1.0, 0.5]}), out=tmp_path / "run")
    table = leaderboard(folder)
    weights = read_rounds(folder)[0].agents
    first, *others = [agent.hparams.reward_weights["last"] for agent in weights]
    assert first == 0.5
    assert len({first, *others}) == 3
    assert all(0.1 <= weight <= 2.0 for weight in others)
    assert table["reward_weights.last"].notna().all()
    assert "reward_weights.last" in (folder / "leaderboard.csv").read_text()


def test_fitness_and_the_test_measure_the_reward_that_they_name(tmp_path):
    folder = run(two(), out=tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    # Two completions per prompt, each right or wrong.
    assert all(0 <= value <= 1 for value in summary["base"]["per_prompt"])
    assert {value * 2 % 1 for value in summary["best"]["per_prompt"]} == {0.0}
    judged = evaluate_adapter(folder)
    assert judged.own.mean == summary["best"]["mean"]
    both = {**FITNESS, "reward": {"exact": 1.0, "last": 1.0}}
    more = run(two(evolve__fitness=both), out=tmp_path / "both")
    assert json.loads((more / "summary.json").read_text())["base"]["mean"] > summary["base"]["mean"]


class Named:
    reward_names = ("exact", "last")
    weights = np.array([1.0, 1.0])


def test_a_completion_whose_fitness_reward_abstains_counts_as_one_without_a_reward():
    rewards = np.array([[1.0, 0.5], [math.nan, 0.5], [0.0, math.nan]])
    assert_array_equal(weighted(*fitness_rewards(Named, rewards, "exact")), [1, math.nan, 0])
    found = weighted(*fitness_rewards(Named, rewards, {"last": 2.0, "exact": 1.0}))
    assert_array_equal(found, [2, 1, 0])
    assert_array_equal(weighted(*fitness_rewards(Named, rewards, None)), [1.5, 0.5, 0])


def test_an_agent_with_a_weight_is_not_trained_on_other_rewards(tmp_path):
    population = GRPO.population(size=2, model="tiny-sums", device="cpu")
    agent = population[0]
    agent.cohort.set_hparams(0, agent.hparams.with_value("reward_weights.last", 0.5))
    with pytest.raises(ConfigError, match=r"reward_weights\.last of an agent: expected a reward"):
        population.train("sums", rounds=1, steps_per_round=1, progress=False)


def test_a_population_from_python_searches_weights(tmp_path):
    def last(completion):
        return int(completion[-1]) / 9 if completion[-1:].isdigit() else 0.0

    env = DatasetEnv(ROWS, [exact, last], prompt="{question}", reward_weights={"last": 0.25})
    ranges = {"reward_weights.last": {"min": 0.1, "max": 2.0}}
    population = GRPO.population(
        size=3, model="tiny-sums", device="cpu", hyperparameters=ranges, group_size=4
    )
    how = {name: value for name, value in SHORT.items() if name != "fitness"}
    with pytest.raises(
        ConfigError, match=r"evolve\.fitness\.reward: .* reward_weights\.last, .*name the"
    ):
        population.train(env, **how)
    fitness = {"reward": "exact", **SHORT["fitness"]}
    population.train(env, **how, fitness=fitness, out=tmp_path / "run")
    (record,) = read_rounds(tmp_path / "run")
    assert record.agents[0].hparams.reward_weights == {"last": 0.25}
    assert not math.isnan(record.agents[0].score.mean)
