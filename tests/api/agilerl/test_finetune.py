"""The finetune functions, and the code of the reference documentation that calls them."""

import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from text_agents import Count
from text_agents import agilerl_agents as agents
from transformers import AutoModelForCausalLM, AutoTokenizer

import evo_grpo
from evo_grpo import agilerl
from evo_grpo.agilerl import (
    GRPO,
    GSPO,
    HyperparameterConfig,
    Mutations,
    ReasoningGym,
    RLParameter,
    TokenObservationWrapper,
    TournamentSelection,
    finetune_llm_multiturn,
    finetune_llm_reasoning,
    save_llm_checkpoint,
)
from evo_grpo.errors import CheckpointError, ConfigError, RunFailedError

ASSETS = Path(evo_grpo.__file__).parent / "assets"
TINY = ASSETS / "tiny-sums"

ROWS = [{"question": f"{a:02d}+07=", "answer": f"{a + 7:03d}"} for a in range(40)]


def exact(completion, answer):
    return float(completion == answer)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def sums(tokenizer):
    return gym(tokenizer, 2)


def quick(env_or_factory, pop, **settings):
    """A call of the right one of the two functions, silent and with a small evaluation."""
    settings = {"verbose": False, "eval_prompts": 3, "evaluation_interval": 2, **settings}
    if isinstance(env_or_factory, ReasoningGym):
        return finetune_llm_reasoning(pop, env_or_factory, **settings)
    settings = {"max_turns": 3, "prompts_per_step": 2, **settings}
    return finetune_llm_multiturn(pop, env_or_factory, **settings)


def weights(agent):
    cohort = agent.cohort
    return [p.detach().clone() for p in cohort.slots.parameters(agent.state.adapter)]


@pytest.mark.parametrize("listed", [True, False], ids=["a list", "a population"])
def test_calls_of_one_evaluation_each_evolve_as_one_call_does(sums, listed):
    """Whose last evaluation selects nobody, as nothing trains after it."""
    space = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-1))

    def trained(calls, steps):
        made = agents(4, hp_config=space)
        pop = list(made) if listed else made
        for _ in range(calls):
            quick(
                sums, pop, max_steps=steps, evaluation_interval=1, evo_steps=1,
                tournament=TournamentSelection(2, True, 4), mutation=Mutations(0, 1),
            )  # fmt: skip
        return list(made)

    once, often = trained(1, 3 * 32), trained(3, 32)
    assert any(agent.state.member.id > 3 for agent in once)
    for one, other in zip(once, often, strict=True):
        assert not differ(weights(one), weights(other))
        assert one.state.member.id == other.state.member.id
        assert one.hparams == other.hparams


def differ(first, second):
    return any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- the reference documentation


@pytest.mark.slow
def test_the_code_of_the_reference_pages_runs(tmp_path):
    """The blocks of the GRPO and GSPO pages: imports, the model and step counts are changed."""
    model = AutoModelForCausalLM.from_pretrained(
        str(TINY),
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(TINY))
    agent = GSPO(
        actor_network=model,
        pad_token_id=tokenizer.eos_token_id,
        pad_token=tokenizer.eos_token,
        device="cuda" if torch.cuda.is_available() else "cpu",
        batch_size=8,
        group_size=8,
    )
    # 1) Single-turn / reasoning datasets (ReasoningGym)
    train_ds = Dataset.from_dict(
        {
            "question": ["2+2?", "Capital of France?"],
            "answer": ["4", "Paris"],
        }
    )
    test_ds = Dataset.from_dict(
        {
            "question": ["3+3?"],
            "answer": ["6"],
        }
    )

    def reward_fn(completion: str, answer: str, question: str) -> float:
        del question
        return float(answer.lower() in completion.lower())

    reasoning_env = ReasoningGym(
        train_dataset=train_ds,
        test_dataset=test_ds,
        tokenizer=tokenizer,
        reward_fn=reward_fn,
        conversation_template=[{"role": "user", "content": "Q: {question}\nA:"}],
        data_batch_size_per_gpu=2,
    )
    trained_pop = finetune_llm_reasoning(
        pop=[agent],
        env=reasoning_env,
        max_steps=40,
        evaluation_interval=2,
    )
    assert trained_pop == [agent]
    assert agent.steps == 3  # 16 completions each
    assert len(agent.fitness) == 2

    # 2) Multi-turn text environments (factory + wrapper)
    class ToyMultiTurnEnv:
        def reset(self, seed=None):
            del seed
            return "Start: What is 2+2?", {}

        def step(self, action: str):
            reward = 1.0 if "4" in action else 0.0
            return "Done.", reward, True, False, {"correct": bool(reward)}

    def env_factory():
        return TokenObservationWrapper(
            env=ToyMultiTurnEnv(),
            tokenizer=tokenizer,
            max_turns=4,
            pad_id=tokenizer.eos_token_id,
            max_model_len=512,
            max_output_tokens=16,
        )

    trained_pop = finetune_llm_multiturn(
        pop=[agent],
        max_turns=4,
        env_factory=env_factory,
        max_steps=16,
        evaluation_interval=50,
    )
    assert trained_pop == [agent]
    assert agent.steps == 5
    assert len(agent.fitness) == 3

    save_llm_checkpoint(agent, tmp_path / "checkpoint")
    base_model = AutoModelForCausalLM.from_pretrained(str(TINY))
    loaded = PeftModel.from_pretrained(base_model, str(tmp_path / "checkpoint" / "actor"))
    assert loaded.peft_config["default"].r == 16


def test_the_grpo_page_builds_its_agent_from_the_environments_spaces(sums, tokenizer):
    env = sums
    agent = GRPO(
        env.observation_space,
        env.action_space,
        actor_network=AutoModelForCausalLM.from_pretrained(str(TINY)),
        pad_token_id=tokenizer.eos_token_id,
        pad_token=tokenizer.eos_token,
        device="cuda" if torch.cuda.is_available() else "cpu",
        batch_size=8,
        group_size=8,
    )
    assert quick(env, agent, max_steps=1) is agent


# --- the environment


def gym(tokenizer, *args, **settings):
    return ReasoningGym(ROWS[:30], ROWS[30:], tokenizer, exact, "{question}", *args, **settings)


def test_positions_and_spaces(tokenizer):
    env = gym(tokenizer, 3, max_context_length=64, max_output_tokens=5)
    assert env.batch_size == 3
    observation, action = env.observation_space, env.action_space
    assert (observation.vocab_size, observation.max_tokens) == (len(tokenizer), 64)
    assert (action.vocab_size, action.max_tokens) == (len(tokenizer), 5)
    assert agilerl.HuggingFaceGym is ReasoningGym


def test_it_is_the_environment_of_evo_grpo(tokenizer):
    ours = evo_grpo.ReasoningGym(
        ROWS[:30], ROWS[30:], tokenizer, exact, "{question}", batch_size=4, seed=5
    )
    theirs = gym(tokenizer, 4, seed=5)
    assert ours.batch(3) == theirs.batch(3)
    assert ours.task == theirs.task


# --- budgets


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ({"max_steps": 1}, 1),
        ({"max_steps": 16}, 1),  # 2 agents, 2 prompts, groups of 4
        ({"max_steps": 17}, 2),
        ({"num_epochs": 1, "prompts_per_step": 9}, 3),  # 27 of the 30 rows are for training
        ({"num_epochs": 2, "prompts_per_step": 27, "max_steps": 1}, 2),  # epochs win
        ({"prompts_per_step": 14}, 2),  # neither: one pass
    ],
)
def test_max_steps_counts_the_completions_of_all_agents_and_epochs_the_rows(sums, budget, steps):
    population = quick(sums, agents(2), **budget)
    assert [agent.steps for agent in population] == [steps, steps]
    # An evaluation every two steps, and one at the end.
    assert [len(agent.fitness) for agent in population] == [math.ceil(steps / 2)] * 2


def test_a_step_of_an_episode_is_a_turn():
    population = agents(1, group_size=2)
    # 2 seeds, 2 episodes each, 3 turns: 12 completions a step.
    quick(lambda: Count(3, strict=False), population, max_steps=13)
    assert population[0].steps == 2


def test_batch_size_counts_rows_and_need_not_divide(sums):
    (agent,) = quick(sums, agents(1, batch_size=3), max_steps=1)
    assert agent.state.last["updates"] in (2.0, 3.0)  # 8 rows in minibatches of 3, 3 and 2
    seeds = []

    class Seen(Count):
        def reset(self, seed=None):
            seeds.append(seed)
            return super().reset(seed)

    quick(Seen, agents(1, batch_size=9), max_steps=1, prompts_per_step=None, eval_prompts=1)
    # 9 rows in groups of 4 are three groups; then one episode of evaluation.
    assert len(seeds) == 13
    assert len(set(seeds)) == 4


def test_max_reward_ends_training_where_it_is_reached(sums):
    (agent,) = quick(sums, [agents(1)[0]], max_steps=10_000, max_reward=-1.0)
    assert agent.steps == 2


def test_a_second_call_goes_on_with_other_prompts(sums):
    population = agents(1)
    seen = []
    whole = sums.batch
    sums.batch = lambda step, size: seen.append(step) or whole(step, size)
    pop = [population[0]]
    quick(sums, pop, max_steps=24)
    quick(sums, pop, max_steps=8)
    assert len(set(seen)) == len(seen) == 4


# --- populations


def evolution(**settings):
    return {
        "tournament": TournamentSelection(2, elitism=True, population_size=3),
        "mutation": Mutations(no_mutation=0.0, rl_hp=1.0),
        **settings,
    }


def trio(**changes):
    ranges = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-2))
    return agents(3, hp_config=ranges, **changes)


@pytest.mark.parametrize("world", ["sums", "count"])
def test_a_population_evolves_at_every_evaluation_but_the_last(sums, world):
    population = trio()
    env = sums if world == "sums" else lambda: Count(2)
    trained = quick(env, population, max_steps=80, **evolution(evaluation_interval=1))
    assert trained is population
    assert len(population.rounds) >= 3
    for record, following in zip(population.rounds, population.rounds[1:], strict=False):
        born = [m.id for m in record.members]
        assert born != [a.member for a in record.agents]
        assert [a.member for a in following.agents] == born
    last = population.rounds[-1]
    assert [m.id for m in last.members] == [a.member for a in last.agents]
    assert len({agent.hparams.lr for agent in population}) > 1
    assert list(population.leaderboard()["agent"].sort_values()) == [0, 1, 2]


def test_evo_steps_leaves_evaluations_in_between_without_an_evolution(sums):
    population = quick(
        sums, trio(), max_steps=24 * 4, **evolution(evaluation_interval=1, evo_steps=2)
    )
    moved = [[m.id for m in r.members] != [a.member for a in r.agents] for r in population.rounds]
    assert moved == [False, True, False, False]


def test_a_list_of_agents_of_one_base_trains_together_and_evolves(sums):
    population = trio()
    generations = []
    whole = population.cohort.engine.rollout

    def counted(requests):
        generations.append(len(requests))
        return whole(requests)

    population.cohort.engine.rollout = counted
    pop = list(population)
    assert quick(sums, pop, max_steps=24, **evolution()) is pop
    assert set(generations) == {3}


# --- files


def test_checkpoints_and_the_elite_can_be_loaded(sums, tmp_path):
    population = quick(
        sums,
        agents(2),
        max_steps=16 * 4,
        evaluation_interval=1,
        checkpoint_interval=2,
        checkpoint_path=tmp_path / "saved",
        elite_path=tmp_path / "elite",
    )
    found = sorted(str(p.relative_to(tmp_path)) for p in (tmp_path / "saved").glob("*/*"))
    assert found == [f"saved/step-{n:06d}/agent-0{a}" for n in (2, 4) for a in (0, 1)]
    best = max(population, key=lambda agent: agent.fitness[-1])
    loaded = GRPO.load(tmp_path / "elite")
    assert not differ(weights(best), weights(loaded))
    attributes = json.loads((tmp_path / "elite" / "attributes.json").read_text())
    assert attributes["steps"] == 4
    for folder in (tmp_path / "elite", tmp_path / found[0]):
        with pytest.raises(ConfigError, match=r"^GSPO.load: .* is of GRPO, .* use GRPO.load"):
            GSPO.load(folder)


# --- what is shown


def test_progress_is_that_of_a_run(sums, capsys):
    finetune_llm_reasoning(agents(2), sums, max_steps=48, evaluation_interval=1, eval_prompts=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()[:6] == "round "]
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3"]
    assert "best " in lines[0]
    assert "(agent" in lines[0]


# --- bad input


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"evaluation_intervall": 3}, ConfigError, "did you mean 'evaluation_interval'"),
        ({"max_steps": 0}, ConfigError, "max_steps: expected an integer >= 1, or null, got 0"),
        ({"eval_prompts": True}, ConfigError, "eval_prompts: expected an integer"),
        (
            {"max_step": 9},
            ConfigError,
            "^max_step: unknown key; did you mean 'max_steps'",
        ),
        (
            {"evaluation_interval": None},
            ConfigError,
            "evaluation_interval: expected an integer >= 1, got null",
        ),
        ({"max_steps": 2.5}, ConfigError, "max_steps: .*got 2.5"),
        ({"checkpoint_interval": 5}, ConfigError, "no effect without checkpoint_path"),
        ({"checkpoint_path": "x"}, ConfigError, "no effect without checkpoint_interval"),
        ({"save_elite": True}, ConfigError, "save_elite: has no effect without elite_path"),
        ({"elite_path": f"{__file__}/a"}, CheckpointError, "elite_path: expected a folder .*file"),
        (
            {"checkpoint_path": __file__, "checkpoint_interval": 5},
            CheckpointError,
            "checkpoint_path: expected a folder .*, a file; choose another path",
        ),
        ({"wb": True}, ConfigError, "wb"),
    ],
)
def test_settings_that_cannot_act_are_refused(sums, settings, error, message):
    with pytest.raises(error, match=message):
        finetune_llm_reasoning(agents(1), sums, **settings)


def test_what_is_no_population_is_refused(sums):
    agent = agents(1)[0]
    for pop in ([], ["agent"], [object()], 3, None):
        with pytest.raises(ConfigError, match="expected an agent, a list of agents or a Populat"):
            quick(sums, pop)
    for pop, bases in (([agent, agent], 1), ([agent, agents(1)[0]], 2)):
        with pytest.raises(ConfigError, match=f"different agents over one base, .*over {bases} ba"):
            quick(sums, pop)


def test_the_environment_must_fit_the_function(sums):
    population = agents(1)
    with pytest.raises(ConfigError, match="exactly one of env= and env_fn="):
        finetune_llm_reasoning(population)
    with pytest.raises(ConfigError, match=r"got Count.*finetune_llm_multiturn"):
        finetune_llm_reasoning(population, Count())
    with pytest.raises(ConfigError, match="num_epochs: episodes have no epochs"):
        finetune_llm_multiturn(population, Count, 3, num_epochs=1)
    with pytest.raises(ConfigError, match="max_turns: expected an integer >= 1, got <class"):
        finetune_llm_multiturn(population, 3, Count)
    assert quick(sums, population, max_steps=1) is population
    finetune_llm_reasoning(population, env_fn=lambda: sums, max_steps=1, verbose=False)
    assert population[0].steps == 2


def test_a_run_whose_episodes_all_break_fails_and_closes_its_environments():
    closed = []

    class Never(Count):
        def step(self, action):
            raise OSError("gone")

        def close(self):
            closed.append(self)

    with pytest.raises(RunFailedError, match=r"Never.*OSError: gone"):
        quick(Never, agents(1), max_steps=1)
    assert closed
