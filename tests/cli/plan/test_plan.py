"""The plan of a run, and its text: rows, tokens and bytes before anything is loaded."""

import io
import json
import shutil
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console
from small_run import small
from transformers import AutoConfig

from evo_grpo import run
from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.cli.plan.render import render_plan
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.evolve.sizes import prompts_of_agents
from evo_grpo.record.folder import read_rounds
from evo_grpo.settings import from_dict
from evo_grpo.sources import embedded_models
from evo_grpo.training.assemble import round_settings
from evo_grpo.training.sizing.cards import Gpu
from evo_grpo.training.sizing.machine import format_bytes
from evo_grpo.training.sizing.model_size import classifier_parameters

ROOT = Path(__file__).resolve().parents[3]
MINIMAL = {"model": "tiny-sums", "env": "sums"}

#: What `check` asks for the GPUs of this machine.
DEVICES = "evo_grpo.training.sizing.machine.cuda_devices"


# --- rows and tokens -----------------------------------------------------------------------------


def test_rows_are_those_of_the_settings_and_tokens_upper_bounds():
    overrides = [
        "population={size: 4, rounds: 3, steps_per_round: 5}",
        "algorithm={prompts_per_step: 2, group_size: 6}",
        "evolve.fitness={prompts: 20, samples: 2, test_prompts: 30, test_samples: 3}",
        "evolve.archive=true",
    ]
    plan = make_plan(from_dict(MINIMAL, overrides))
    assert plan.places == (4, 2, 2)
    assert plan.decisions == (1, 2, 3)
    assert plan.group_sizes == (6, 6)
    assert plan.max_output_tokens == 4  # the hint of the task
    assert plan.rows_per_step == 4 * 2 * 6
    assert plan.tokens_per_round == 5 * 48 * 4
    # The archive and the best agent are measured afresh, once there is an archive.
    assert plan.evaluation_tokens == (4 * 20 * 2 * 4, (2 + 2) * 20 * 2 * 4, (2 + 2) * 20 * 2 * 4)
    assert plan.finalists == 3
    assert plan.final_tokens == 3 * 20 * 2 * 4
    assert plan.test_tokens == 2 * 30 * 3 * 4
    assert plan.total_tokens == 3 * 960 + 640 + 640 + 640 + 480 + 720
    assert plan.rows == {"train": 9000, "validation": 500, "test": 500}


@pytest.mark.parametrize(
    ("overrides", "places"),
    [
        (["population.rounds=2"], (8, 4)),
        (["population.sizes=constant"], (8,) * 6),
        (["population.sizes=[8, 6, 5]"], (8, 6, 5, 5, 5, 5)),
        (["evolve.selection.kind=none"], (8,) * 6),
        (["evolve.selection.kind=none", "population.sizes=[8, 4]"], (8, 4, 4, 4, 4, 4)),
    ],
)
def test_places_are_those_that_a_run_has(overrides, places):
    config = from_dict(MINIMAL, overrides)
    assert make_plan(config).places == places
    played = round_settings(config.population, config.evolve, config.record, 4, 8)
    assert tuple(played.room(n, 8) for n in range(config.population.rounds)) == places


@pytest.mark.parametrize("largest", [4, 6, 10, 40])
def test_no_mutation_of_the_group_size_makes_more_rows_than_planned(largest):
    overrides = [
        "population={size: 4, rounds: 3, steps_per_round: 5}",
        "algorithm={prompts_per_step: 2, group_size: 4}",
        f"evolve.hyperparameters={{group_size: {{min: 4, max: {largest}}}}}",
    ]
    plan = make_plan(from_dict(MINIMAL, overrides))
    assert plan.rows_per_step == 4 * 2 * 4
    bound = plan.tokens_per_round // plan.max_output_tokens
    rows = [
        sum(
            n * size
            for step in prompts_of_agents(plan.rows_per_step, 5, sizes)
            for n, size in zip(step, sizes, strict=True)
        )
        for agents in (2, 4)
        for sizes in product((4, (4 + largest) // 2, largest), repeat=agents)
    ]
    assert max(rows) <= bound
    assert bound - max(rows) <= largest // 2


@pytest.mark.parametrize(
    ("racing", "looks"), [(0.0, 0), (0.1, 0), (0.2, 0), (0.25, 2), (0.5, 4), (2.0, 16)]
)
def test_racing_looks_again_at_no_more_than_its_share(racing, looks):
    overrides = [f"evolve.fitness.racing={racing}", "population.decisions=every"]
    plan = make_plan(from_dict(MINIMAL, overrides))
    assert plan.evaluation_tokens[0] == (8 + looks) * 64 * 4


@pytest.mark.parametrize(
    ("overrides", "finalists"),
    [
        (["evolve.archive=true"], 3),
        ([], 2),
        (["evolve.archive=true", "population.sizes=[8, 4, 2, 1]"], 2),
        (["evolve.fitness.final_samples=0"], 0),
        (["population.rounds=1"], 0),
    ],
)
def test_the_end_compares_those_that_there_can_be(overrides, finalists):
    plan = make_plan(from_dict(MINIMAL, overrides))
    assert plan.finalists == finalists
    assert plan.final_tokens == finalists * 64 * 2 * 4


def test_a_run_takes_no_more_than_its_plan_says(tmp_path: Path):
    config = small(
        population__sizes=None,
        population__size=4,
        evolve__hyperparameters={"group_size": {"min": 3, "max": 6}},
        evolve__archive=True,
        evolve__fitness={"prompts": 6, "racing": 1.0, "final_samples": 2, "test_prompts": 6},
    )
    plan, folder = make_plan(config), run(config, out=tmp_path / "run")
    rounds = read_rounds(folder)
    assert tuple(len(record.agents) for record in rounds) == plan.places
    for record, bound in zip(rounds, plan.evaluation_tokens, strict=True):
        assert record.evaluation_tokens <= bound
        assert sum(agent.tokens for agent in record.agents) <= plan.tokens_per_round
    tensors = [p.stat().st_size for p in (folder / "checkpoints").rglob("*.safetensors")]
    header = 16_000  # bytes of the names and shapes of a file's tensors, at most
    assert sum(tensors) <= plan.checkpoint_bytes + len(tensors) * header


def test_evaluations_take_no_more_prompts_than_there_are():
    overrides = ["env.args={validation_size: 10, test_size: 7}", "evolve.archive=true"]
    plan = make_plan(from_dict(MINIMAL, overrides))
    assert plan.decisions == (2, 3, 4, 6)
    agents = (0, 8, 4 + 2, 2 + 2, 0, 2 + 2)  # with the archive and the best agent, to compare them
    assert plan.evaluation_tokens == tuple(n * 10 * 4 for n in agents)
    assert plan.final_tokens == 3 * 10 * 2 * 4
    assert plan.test_tokens == 2 * 7 * 4 * 4
    validation, test = plan.warnings
    assert validation == (
        "evolve.fitness.prompts is 64, but validation has 10 rows: only these are used; add "
        "rows, or lower it"
    )
    assert test.startswith("evolve.fitness.test_prompts is 256, but test has 7 rows: only")


GAME = """
class Echo:
    def reset(self, *, seed=None):
        return "say a", {}

    def step(self, action):
        return "say a", float(action == "a"), False, False, {}
"""


def test_a_game_has_turns_and_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "echo_game.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    env = {"kind": "python:echo_game:Echo", "max_turns": 3}
    overrides = [
        "algorithm.max_output_tokens=5",
        "evolve.fitness={test_prompts: 10}",
        "population.decisions=every",
    ]
    plan = make_plan(from_dict({"model": "tiny-sums", "env": env}, overrides))
    assert (plan.rows, plan.turns) == ({}, 3)
    text = rendered(*overrides, settings={"model": "tiny-sums", "env": env})
    assert "python:echo_game:Echo: episodes of at most 3 turns" in text
    assert "of at most 5 tokens in each of 3 turns" in text
    assert plan.tokens_per_round == 4 * 8 * 4 * 8 * 5 * 3
    assert plan.evaluation_tokens[0] == 8 * 64 * 5 * 3
    assert plan.test_tokens == 2 * 10 * 4 * 5 * 3


def test_bytes_are_those_of_adapter_gradient_and_adam():
    overrides = ["population.size=3", "population.rounds=2", "evolve.archive=true"]
    plan = make_plan(from_dict(MINIMAL, overrides))
    assert plan.adapter_parameters == 58_368
    assert plan.bytes_per_agent == 58_368 * 16
    assert plan.base_bytes == {"float32": 453_216 * 4, "bfloat16": 453_216 * 2}
    # Three agents, then two, the best ever and a mean: weights and two moments, without gradients.
    assert plan.checkpoint_bytes == (3 + 2 + 1 + 1) * 58_368 * 12
    last = from_dict(MINIMAL, ["record.checkpoints=last", "engine.dtype=float16"])
    assert make_plan(last).checkpoint_bytes == (8 + 1 + 1) * 58_368 * 12
    assert make_plan(last).base_bytes == {"float16": 453_216 * 2}
    overrides = ["population.sizes=constant", "population.rounds=3"]
    plain = make_plan(from_dict(MINIMAL, overrides))
    assert plain.checkpoint_bytes == (3 * 8 + 1) * 58_368 * 12


def test_a_package_that_is_missing_is_named(monkeypatch):
    config = from_dict(MINIMAL, ["engine.quantization=int8"])
    assert make_plan(config).base_bytes["float32"] < 453_216 * 2
    monkeypatch.setattr("evo_grpo.cli.plan.plan.find_spec", lambda _name: None)
    (text,) = [text for text in make_plan(config).warnings if "quantization" in text]
    assert text.endswith('pip install "evo-grpo[bitsandbytes]", or leave it out')


@pytest.mark.slow
def test_a_machine_that_is_too_small_is_warned_of(monkeypatch):
    monkeypatch.setattr("evo_grpo.training.sizing.machine.machine_memory", lambda: 200 << 20)
    config = from_dict(MINIMAL, ["engine.device=cpu"])
    assert any(
        "of memory and this machine has 210 MB" in text for text in make_plan(config).warnings
    )
    monkeypatch.setattr(DEVICES, lambda: [Gpu("card", 8 << 30)])
    auto = from_dict(MINIMAL, ["engine.device=auto"])
    assert make_plan(auto).warnings == ()
    monkeypatch.setattr(DEVICES, lambda: [None, Gpu("card", 100 << 20)])
    assert any(
        "of memory and the CUDA device has 105 MB" in text for text in make_plan(auto).warnings
    )


def test_a_card_is_planned_for_where_it_is_not(monkeypatch):
    monkeypatch.setattr(DEVICES, list)
    monkeypatch.setattr("evo_grpo.training.sizing.machine.machine_memory", lambda: 1)
    config = from_dict(MINIMAL, ["engine.device=cuda"])
    wide = make_plan(config, gpu=Gpu("24GB", 24 * 10**9))
    assert (wide.fit.fits, wide.warnings) == (True, ())
    assert wide.fit.chosen == {
        "engine.max_decode_rows": 512,  # an evaluation of eight agents
        "engine.max_tokens_per_microbatch": wide.memory[0].micro_batch_tokens,
    }
    assert [memory.dtype for memory in wide.memory] == ["bfloat16"]
    narrow = make_plan(config, gpu=Gpu("850MB", 850 * 10**6))
    fewer = from_dict(MINIMAL, ["engine.device=cuda", "engine.max_decode_rows=4096"])
    assert narrow.fit.fits
    given = make_plan(
        from_dict(MINIMAL, ["engine={device: cuda, max_tokens_per_microbatch: 999999}",
                            "algorithm.prompts_per_step=64"]),
        gpu=Gpu("900MB", 900 * 10**6),
    )  # fmt: skip
    (warning,) = given.warnings
    assert not given.fit.fits
    assert "and 900MB has 900 MB; the largest part is activations of a micro-batch" in warning
    assert "--set engine.max_tokens_per_microbatch=" in warning
    assert make_plan(fewer, gpu=Gpu("24GB", 24 * 10**9)).fit.fits
    with pytest.raises(ConfigError, match=r"--gpu: expected engine.device auto or cuda, got cpu"):
        make_plan(from_dict(MINIMAL, ["engine.device=cpu"]), gpu=Gpu("24GB", 24 * 10**9))


CHAT = {"kind": "dataset", "train": "rows.csv", "reward": "mine:reward"}


@pytest.mark.parametrize(
    ("env", "remedy"),
    [
        (CHAT, 'or a raw text: env.prompt: "{question}'),
        (CHAT | {"conversation": [{"role": "user", "content": "{question}"}]}, "or a raw text"),
        (CHAT | {"prompt": "{question}"}, None),
        ({"kind": "python:mine:Game"}, "has none; take a model that has one"),
    ],
)
def test_messages_for_a_model_without_a_chat_template_are_refused(
    env, remedy, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{number},{number}\n" for number in range(100))
    Path("rows.csv").write_text(f"question,answer\n{rows}")
    Path("mine.py").write_text(
        "def reward(completion): return 0.0\n\n\nclass Game:\n"
        "    def reset(self, seed=None): ...\n    def step(self, action): ...\n"
    )
    shutil.copytree(embedded_models()["tiny-sums"], "model")
    configuration = Path("model/tokenizer_config.json")
    # With its own template all of them are fine.
    assert make_plan(from_dict({"model": "./model", "env": env})).turns >= 1
    without = json.loads(configuration.read_text())
    del without["chat_template"]
    configuration.write_text(json.dumps(without))
    config = from_dict({"model": "./model", "env": env})
    if remedy is None:
        assert make_plan(config).task == "dataset"
        return
    with pytest.raises(ConfigError) as caught:
        make_plan(config)
    assert "need a chat template, and the tokenizer of './model' has none; " in str(caught.value)
    assert remedy in str(caught.value)


def test_an_unknown_architecture_is_not_guessed(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    plan = make_plan(from_dict({**MINIMAL, "model": str(tmp_path)}))
    assert plan.base.parameters is None
    assert plan.adapter_parameters is None
    assert plan.bytes_per_agent is plan.checkpoint_bytes is None
    assert plan.memory == ()
    assert plan.base.note == "the layers of architecture 'mamba' are not known here"


# --- order and cost ------------------------------------------------------------------------------


def test_keywords_that_the_chat_template_ignores_are_said():
    env = {
        "kind": "dataset",
        "train": [{"question": f"{n}+1="} for n in range(20)],
        "reward": lambda completion: 1.0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    (said,) = (
        text for text in make_plan(from_dict({**MINIMAL, "env": env})).warnings if "chat" in text
    )
    assert said.startswith(
        "env.chat_template_kwargs: the model's chat template does not read enable_thinking"
    )


def test_a_reward_model_is_in_the_memory_or_named_as_left_out(tmp_path):
    folder = tmp_path / "judge"
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "vocab_size": 1000, "num_labels": 1}  # fmt: skip
    AutoConfig.for_model("qwen2", **shape).save_pretrained(folder)
    with_reward = from_dict(MINIMAL, [f"env.reward={{kind: model, name: {folder}}}"])
    more, less = (make_plan(config).memory[0] for config in (with_reward, from_dict(MINIMAL)))
    parameters = classifier_parameters(str(folder))
    assert parameters > 1000 * 64
    assert more.peak - less.peak == 4 * parameters

    AutoConfig.for_model("bert").save_pretrained(folder)
    (warning,) = [line for line in make_plan(with_reward).warnings if "reward model" in line]
    assert f"leaves out the reward model {folder}" in warning


# --- as text ------------------------------------------------------------------------------------


def rendered(*overrides: str, settings: dict = MINIMAL, width: int = 300) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(render_plan(make_plan(from_dict(settings, overrides)), "echo.yaml"))
    return console.file.getvalue()


def test_the_first_prompt_and_the_calls_of_rewards_are_shown(tmp_path, monkeypatch):
    (tmp_path / "called.py").write_text(
        "def one(completion, answer):\n    ...\n\ndef all(completions, **kwargs):\n    ...\n"
    )
    rows = "".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    reward = ["called:one", "called:all"]
    env = {"kind": "dataset", "train": "rows.jsonl", "prompt": "{question}\n=", "reward": reward}
    lines = rendered(settings={"model": "tiny-foods", "env": env}).splitlines()
    (asked,) = (n for n, line in enumerate(lines) if line.startswith("the first prompt as the mod"))
    number = lines[asked + 1].strip("> ?")
    assert lines[asked].endswith(f"it, {len(number) + 3} tokens:")  # one a character
    assert lines[asked + 1 : asked + 3] == [f"> {number}?", "> ="]
    text = "\n".join(lines)
    assert f"rewards     one(answer='{number}', completion='...')" in text
    assert f"all(question=['{number}?'], answer=['{number}'], completions=['...']" in text


# Overrides, and a part of the text for them.
SHOWN = """
evolve.selection=none
    selection none
evolve.selection=tournament
    selection tournament (size 4, elitism true)
evolve.selection=truncation
    selection truncation (share 0.25)
seed=0
    places      8 agents in rounds 1-2, 4 in round 3, 2 in rounds 4-6
population.rounds=20
    places      8 agents in rounds 1-5, 4 in rounds 6-10, 2 in rounds 11-20
population.sizes=[8, 4, 1] && evolve.archive=true
    places      8 agents in round 1, 4 in round 2, 1 in rounds 3-6
population.sizes=constant
    places      8 agents in every round
seed=0
    decides     after rounds 2 (8 agents), 3 (4), 4 (2) and 6 (2)
population.decisions=every
    decides     after each round
population.rounds=3
    decides     after each round
population.decisions=[6]
    decides     after round 6 (8 agents)
population.decisions=[4]
    decides     after rounds 4 (8 agents) and 6 (8)
population.rounds=40 && population.decisions=[2, 4]
    (8 agents), 4 (4), 6 (4), 8 (4), 10 (4), 12 (4), 14 (4), 12 more and 40 (4)
population.rounds=40 && evolve.exploration={kind: schedule, rounds: [{round: 9, lr: 1.0e-3}]}
    decides     after each round
evolve.selection=none && evolve.exploration={kind: schedule, rounds: [{round: 2, lr: 2.0e-3}]}
    from round 2 on lr 2e-3
evolve.archive=true
    for every agent at a decision, and for the archive and the best agent, to compare
seed=0
    ; none in other rounds, whose fitness is the mean reward of training
evolve.fitness.between=5
    ; 5 prompts x 1 in other rounds
evolve.fitness.between=1
    ; 1 prompt x 1 in other rounds
population.decisions=every
    64 prompts x 1 for every agent that played
env.args={validation_size: 10}
    up to 2 finalists on 10 validation prompts x 2
seed=0
    32 per agent, 4 prompts x 8 completions; 128 per agent once 2 agents are left
population.sizes=[8, 5, 3]
    about 85 per agent once 3 agents are left
evolve.hyperparameters={group_size: {min: 4, max: 16}}
    groups have 4 to 16
evolve.fitness.racing=0.5
    by racing up to 50% more
"""
LINES = SHOWN.strip().split("\n")


@pytest.mark.parametrize(
    ("overrides", "text"), [*zip(LINES[::2], map(str.strip, LINES[1::2]), strict=True)]
)
def test_what_a_setting_changes_in_the_plan_is_shown(overrides: str, text: str):
    assert text in rendered(*overrides.split(" && "))


def test_sizes_are_short():
    sizes = [0, 999, 1_000, 933_888, 1_812_864, 3_200_000_000_000]
    shown = ["0 bytes", "999 bytes", "1.0 kB", "934 kB", "1.8 MB", "3.2 TB"]
    assert [*map(format_bytes, sizes)] == shown


def test_evaluations_have_their_share_of_the_run():
    plan = make_plan(from_dict(MINIMAL))
    tokens = sum(plan.evaluation_tokens)
    share = f"{tokens / plan.total_tokens:.0%}"
    assert f"at most {tokens:,} tokens, {share} of the run: " in rendered()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_folds_the_text_and_keeps_the_titles(width: int):
    lines = rendered(width=width).splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    titles = {line[:10].strip() for line in lines}
    assert {"population", "places", "mutates", "task", "a step", "a round", "memory"} <= titles


def test_metrics_and_readers_are_named(monkeypatch: pytest.MonkeyPatch):
    text = rendered()
    assert "metrics/" in text
    assert "readers" not in text
    assert "metrics/" not in rendered("record.metrics=false")
    monkeypatch.setattr("evo_grpo.settings.trackers.find_spec", lambda name: name)
    text = rendered("record.trackers=[wandb, mlflow]")
    assert " ".join(text.split()).count("readers wandb, mlflow") == 1
    monkeypatch.setattr("evo_grpo.settings.trackers.find_spec", lambda name: None)
    with pytest.raises(EngineUnavailable, match=r'pip install "evo-grpo\[wandb\]"'):
        rendered("record.trackers=[wandb, mlflow]")
