"""Prompts by name, `env.prompts`, of which every agent has its own."""

import json
from pathlib import Path

import jsonschema
import optuna
import pytest
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
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.steering import ask
from evo_grpo.settings import EnvConfig, json_schema

SUMS = {"kind": "sums", "args": {"high": 20}}
PROMPTS = {"plain": {}, "swapped": {"prompt": "{b}+{a}="}, "zero": {"prompt": "0+{a}+{b}="}}
NAMED = {**SUMS, "prompts": PROMPTS}
SEARCHED = {"prompt": {"choices": ["plain", "swapped", "zero"]}}
LR = {"lr": {"min": 1e-4, "max": 1e-2}}
QUESTIONS = [{"question": f"What is {n}?", "answer": str(n)} for n in range(20)]


SHORT = {
    **{"rounds": 1, "steps_per_round": 1, "progress": False},
    "fitness": {"prompts": 4, "test_prompts": 3},
}


def two_agents(*prompts):
    ranges = {"prompt": RLParameter(choices=list(prompts))}
    return GRPO.population(
        size=2, model="tiny-sums", device="cpu", hyperparameters=ranges, group_size=4
    )


def named(**changes):
    settings = {"env": NAMED, "evolve__hyperparameters": SEARCHED, **changes}
    return small(**settings)


def digests(folder):
    return [agent.adapter_sha256 for record in read_rounds(folder) for agent in record.agents]


def test_an_agent_trains_and_is_judged_under_its_own_prompt(tmp_path):
    alone = {"population__size": 1, "evolve__selection": "none", "evolve__exploration": "none"}
    own = run(named(**alone, population__init=[{"prompt": "swapped"}]), out=tmp_path / "own")
    as_prompt = {"env": {**SUMS, "prompt": "{b}+{a}="}, "evolve__hyperparameters": {}}
    fixed = run(named(**alone, **as_prompt), out=tmp_path / "fixed")
    plain = run(named(**alone, population__init=[{"prompt": "plain"}]), out=tmp_path / "plain")
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


def test_a_resumed_search_ends_as_one_that_was_not_stopped(tmp_path):
    config = named(evolve__exploration={"kind": "mutate", "no_mutation": 0})
    whole = run(config, out=tmp_path / "whole")
    stopped = stopped_and_resumed(config, tmp_path / "stopped", ("learn", 1))
    assert outcome(whole) == outcome(stopped)
    changes = [m.mutation.changes for record in read_rounds(whole) for m in record.members]
    moved = [one["prompt"] for one in changes if "prompt" in one]
    assert moved
    assert all({old, new} <= set(PROMPTS) and old != new for old, new in moved)


@pytest.mark.parametrize("exploration", ["resample", "optuna"])
def test_every_exploration_takes_prompts_of_the_choices(exploration, tmp_path):
    folder = run(named(evolve__exploration=exploration), out=tmp_path / "run")
    for record in read_rounds(folder):
        assert {hparams.prompt for hparams in record.next_hparams} <= set(PROMPTS)


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
    judged = evaluate_adapter(made, folder / "population.yaml")
    assert judged.own.mean == summary["best"]["mean"]


@pytest.mark.slow
def test_what_reads_a_run_and_trains_beside_it_takes_prompts(tmp_path):
    folder = run(named(), out=tmp_path / "run")
    journal = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    study = optuna.load_study(study_name=None, storage=journal)
    names = set(PROMPTS)
    assert {trial.params["prompt"] for trial in study.trials} <= names
    assert set(study.trials[0].distributions["prompt"].choices) == names
    page = Path(write_report(folder, tmp_path / "report.html")).read_text()
    assert "swapped" in page
    assert {arm["name"] for arm in compare(folder)["arms"]} == {"guess", "random", "evolved"}
    assert 0 <= replay(folder).training("schedule-run").test.mean <= 1


def test_a_prompt_is_set_by_hand(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(named(population__rounds=2), out=folder, observer=Told(("learn", 0)))
    with pytest.raises(ConfigError, match="expected one of plain, swapped, zero, got swaped"):
        ask(folder, "set", agent=0, values={"prompt": "swaped"})
    ask(folder, "set", agent=0, values={"prompt": "swapped"})
    resume(folder)
    assert read_rounds(folder)[1].agents[0].hparams.prompt == "swapped"


def test_a_population_from_python_searches_prompts(tmp_path):
    rows = [{"question": f"{n:02d}+01=", "answer": f"{n + 1:03d}"} for n in range(30)]

    def exact(completion, answer):
        return float(completion == answer)

    env = DatasetEnv(
        rows, exact, prompt="{question}", prompts={"a": {}, "b": {"prompt": "0{question}"}}
    )
    population = two_agents("a", "b")
    with pytest.raises(ConfigError, match=r"choices: expected one of env\.prompts: none, got 'a'"):
        population.train("sums", **SHORT)
    population.train(env, **SHORT, out=tmp_path / "run")
    (record,) = read_rounds(tmp_path / "run")
    assert [agent.hparams.prompt for agent in record.agents] == ["a", "b"]


def test_an_environment_object_keeps_its_prompts_in_the_record(tmp_path):
    rows = [{"question": f"{n:02d}+01=", "answer": f"{n + 1:03d}"} for n in range(30)]
    population = two_agents("b", "a")

    def gym(other):
        return ReasoningGym(
            rows,
            rows[:6],
            population[0].cohort.base.tokenizer,
            lambda completion, answer: float(completion == answer),
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


def test_an_export_that_is_asked_without_its_prompt_warns(tmp_path):
    alone = {"population__size": 1, "population__rounds": 1, "evolve__selection": "none"}
    folder = run(named(**alone, population__init=[{"prompt": "swapped"}]), out=tmp_path / "run")
    made = export(folder, out=tmp_path / "export", anyway=True)
    with pytest.warns(UserWarning, match="trained with the prompt 'swapped', which env.prompts"):
        evaluate_adapter(made, small(env=SUMS))


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
        lambda completion, answer: float(completion == answer),
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


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"evolve__hyperparameters": {"prompt": {"choices": ["plain", "swaped"]}}},
            ConfigError,
            "evolve.hyperparameters.prompt.choices: expected one of env.prompts: plain, swapped, "
            "zero, got 'swaped'; did you mean 'swapped'?",
        ),
        (
            {"env": SUMS},
            ConfigError,
            "prompt.choices: expected one of env.prompts: none, got 'plain'; add it there",
        ),
        (
            {"evolve__hyperparameters": {"prompt": {"min": 0, "max": 1}}},
            ConfigError,
            "evolve.hyperparameters.prompt: expected choices, a list of possible values",
        ),
        (
            {"evolve__hyperparameters": {"prompt": {"choices": ["plain", "plain"]}}},
            ConfigError,
            "prompt.choices: expected each choice once, got",
        ),
        (
            {"evolve__hyperparameters": {"prompt": {"choices": [1, 2]}}},
            ConfigError,
            "prompt.choices: expected names, which values of prompt are, got a list ([1, 2])",
        ),
        (
            {"population__init": [{"prompt": "plain"}, {"prompt": "no"}, {}]},
            ConfigError,
            "population.init[1].prompt: expected one of plain, swapped, zero, got no",
        ),
        (
            {"env": {**SUMS, "prompts": {"a": {"prompt": "{c}"}}}, "evolve__hyperparameters": LR},
            DataError,
            'no column "c", which env.prompts.a needs',
        ),
        (
            {"env": {**SUMS, "prompts": {"a": "Be brief."}}, "evolve__hyperparameters": LR},
            ConfigError,
            "env.prompts.a.system_prompt: expected messages for the chat template, got the raw",
        ),
        (
            {"env": {**SUMS, "prompts": {"a": {"promt": "{a}"}}}},
            ConfigError,
            "env.prompts.a.promt: unknown key; did you mean 'prompt'?",
        ),
        (
            {"env": {**SUMS, "prompts": {}}},
            ConfigError,
            "env.prompts: expected a mapping of at least one name to a prompt",
        ),
        (
            {
                "env": {
                    **SUMS,
                    "prompts": {
                        "a": {"prompt": "{a}", "conversation": [{"role": "user", "content": "{a}"}]}
                    },
                }
            },
            ConfigError,
            "env.prompts.a: expected prompt or conversation, got both; remove one",
        ),
    ],
)
def test_a_wrong_prompt_is_named_before_anything_is_loaded(
    changes, error, text, tmp_path, monkeypatch
):
    monkeypatch.setattr("evo_grpo.training.assemble.build_cohort", None)
    with pytest.raises(error) as raised:
        run(named(**changes), out=tmp_path / "run")
    assert text in str(raised.value)


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
