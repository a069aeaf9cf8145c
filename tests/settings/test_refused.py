"""Settings that are refused, in a table: the overrides of a file, and the message for them."""

import pytest

from evo_grpo.errors import ConfigError
from evo_grpo.settings import from_dict

MINIMAL = {"model": {"name": "tiny-sums"}, "env": "sums"}

UNKNOWN_KEYS = """
evolve.selection.sise=3
    evolve.selection.sise: unknown key; did you mean 'size'? Expected one of: kind, size, elitism
populaton.size=3
    populaton: unknown key; did you mean 'population'?
lr=3
    lr: unknown key; did you mean algorithm.lr?
engine.qqq=3
    engine.qqq: unknown key; expected one of: device, dtype
evolve.hyperparameters={lrr: {min: 1, max: 2}}
    evolve.hyperparameters.lrr: nothing of that name can mutate. Did you mean 'lr'?
evolve.hyperparameters={lr: {min: 1, maxx: 2}}
    evolve.hyperparameters.lr.maxx: unknown key; did you mean 'max'?
env={kind: sums, conversation: [{rol: user, content: x}]}
    env.conversation[0].rol: unknown key; did you mean 'role'?
evolve.hyperparameters.model.quantization={choices: [int8]}
    evolve.hyperparameters.model: nothing of that name can mutate
"""
NAMES_OF_OTHER_LIBRARIES = """
learning_rate=1e-5
    here it is algorithm.lr.
algorithm.learning_rate=1e-5
    here it is lr.
algorithm.reward_funcs=a:b
    here it is env.reward.
env.reward_funcs=a:b
    here it is reward.
algorithm.num_generations=8
    here it is group_size.
algorithm.peft_config={}
    here it is model.lora.
model.peft_config={r: 4}
    here it is lora.
algorithm.per_device_train_batch_size=8
    here it is prompts_per_step.
"""
MALFORMED_OVERRIDES = """
seed
    --set seed: expected a.b.c=value, for instance
=3
    --set =3: expected a.b.c=value
a..b=3
    --set a..b=3: expected a.b.c=value
seed=[1
    --set seed=[1, line 1
population=
    --set population=: expected a value after =; write population=null
seed.x=1
    seed: expected an integer, got a mapping
algorithm.lr=0.1 && algorithm.lr.x=1
    --set algorithm.lr.x=1: expected a mapping at algorithm.lr, found 0.1
"""
TYPES_AND_RANGES = """
population.size=eight
    population.size: expected an integer >= 1, got the string 'eight'
population.size='8'
    got the string '8'; write it without quotes: 8
population.size=2.5
    population.size: expected an integer >= 1, got 2.5
evolve.fitness.window=101
    evolve.fitness.window: expected an integer in [1, 100], got 101
population.size=null
    population.size: expected an integer >= 1, got null
population=[1]
    population: expected a mapping, got a list ([1])
algorithm.lr=.nan
    algorithm.lr: expected a finite number > 0, or null, got nan
algorithm.kind=gpro
    algorithm.kind: expected 'grpo', 'gspo' or 'cispo', got the string 'gpro'; did you mean 'grpo'?
algorithm.clip_coef=true
    algorithm.clip_coef: expected a number in (0, 1], or
model.lora.target_modules=[]
    model.lora.target_modules: expected a string, or a list of at least one string
env.reward=[f, 1]
    env.reward[1]: expected a function as a string, a mapping with
engine.memory=24gb
    engine.memory: expected a number with its unit, MB, MiB
engine.device=gpu
    engine.device: expected auto, cpu, mps, cuda or cuda:N
name=a/b
    name: expected letters, digits, dots, dashes and underscores
env.args={d: 2026-01-01}
    a date has to be quoted
env.args={low: .inf}
    env.args: expected finite numbers
model.config={scale: [.nan]}
    model.config: expected finite numbers
env.conversation=[]
    env.conversation: expected at least 1 entries, got a list
record.optuna=1
    record.optuna: expected true or false, got 1
model=null
    model.name: missing
population.size=9999999999
    population.size: expected at most 10,000, got 9999999999; lower
population.rounds=100001
    population.rounds: expected at most 100,000, got 100001
population.steps_per_round=10000000
    expected at most 1,000,000, got 10000000
evolve.fitness.racing=1e308
    evolve.fitness.racing: expected a number in [0, 100]
evolve.hyperparameters={lr: {min: 1e-4}}
    lr.max: missing; expected maximum
engine.overlap=2
    engine.overlap: expected true, false or 'auto' (for 2 parts, write shards: 2, overlap: true)
engine.overlap=many
    engine.overlap: expected true, false or 'auto', got
engine.zero=1
    engine.zero: expected 2 or 3, got 1
record.trackers=3
    record.trackers: expected a list, got 3
record.trackers=[{kind: tensorboard, online: true}]
    record.trackers[0].online: tensorboard takes folder alone
record.trackers=[{kind: mlflow, server: "http://me:secret@host"}]
    record.trackers[0].server: expected a URL without user and password
"""
# float32 turns these numbers into nothing or everything.
NUMBERS = """
algorithm.adv_clip_range=1e-40
    adv_clip_range: expected a number from 1e-06 to
algorithm.adv_clip_range=1e300
    adv_clip_range: expected a number from 1e-06 to
algorithm.delta=1e300
    algorithm.delta: expected a number from 1 to 1e+30, which
algorithm.sapo_temperature_pos=1e-40
    sapo_temperature_pos: expected a number from
algorithm.sampler_ratio_cap=1e-40
    sampler_ratio_cap: expected a number >= 1e-06
algorithm.vespo_negative=[1e300, 1]
    vespo_negative: expected two finite numbers from
evolve.fitness.temperature=1e-40
    evolve.fitness.temperature: expected a number from
evolve.hyperparameters.temperature={min: 1e-40, max: 1}
    evolve.hyperparameters.temperature.min: expected a number from 1e-06 to 1e+06
model.lora.alpha=1e-40
    model.lora.alpha: expected a number from 1e-06 to 1e+06
"""
CONTRADICTIONS = """
population.size=1
    population.size: expected at least 2 agents for selection tournament, got 1; raise it, or set ev
population.size=3 && evolve.selection.size=5
    evolve.selection.size: expected at most population.size (3), got 5
population.decisions=never
    population.decisions: expected null, "every" or a list of rounds in ascending order such as [2,
population.decisions=[0, 2]
    population.decisions: expected null, "every" or a list of rounds in ascending
population.decisions=[4, 2]
    population.decisions: expected null, "every" or a list of rounds in ascending
population.decisions=[2, 2]
    population.decisions: expected null, "every" or a list of rounds in ascending
population.decisions=[1.5]
    population.decisions: expected null, "every" or a list of rounds in ascending
evolve.fitness.between=-1
    evolve.fitness.between: expected an integer >= 0, or null, got -1
population.size=2 && population.init=[{}, {lr: 0.5}]
    population.init[1].lr: expected a value inside of its range [0.0001, 0.01], got 0.5
population.init=smaple
    population.init: expected 'latin_hypercube', 'sample', 'same', a list with one mapping per agent
algorithm.lr=1e-3 && evolve.hyperparameters={lr: {min: 1e-6, max: 1e-4}}
    algorithm.lr: expected a value inside evolve.hyperparameters.lr [1e-06, 0.0001], got 0.001; move
evolve.hyperparameters={group_size: {min: 1, max: 8}}
    evolve.hyperparameters.group_size.min: expected an integer >= 2, got 1; a group of one has no ad
algorithm.clip_coef=[0.8, 1.28] && evolve.hyperparameters={clip_coef: {min: 0.1, max: 0.25}}
    algorithm.clip_coef: expected a value inside evolve.hyperparameters.clip_coef [0.1, 0.25], got 0
evolve.exploration={no_mutation: 0, rl_hp: 0}
    evolve.exploration: expected no_mutation or rl_hp above 0
env=dataset && env.reward=m:f
    env.train: expected rows for kind dataset, got null; name a CSV, JSON, JSONL or
env=dataset && env.train=a.csv
    env.reward: expected a reward function for kind dataset, got null; for instance
env.prompt=x && env.conversation=[{role: user, content: x}]
    env.conversation: expected null beside prompt, got a list ([Message(role='user'
env.reward=m:f && env.reward_weights=[1, 2]
    env.reward_weights: expected one weight per function of env.reward (1), got a list
algorithm.max_output_tokens=4 && algorithm.min_output_tokens=5
    algorithm.min_output_tokens: expected at most max_output_tokens (4), got 5
algorithm.max_output_tokens=64 && algorithm.max_model_len=64
    algorithm.max_output_tokens: expected less than max_model_len (64)
population.sizes=[8, 9]
    population.sizes: expected no number above the one before it, got [8, 9]
population.sizes=[4, 2]
    population.sizes: expected population.size (8) as the first number, got [4, 2]
population.sizes=[8, 4, 1] && evolve.archive=false
    population.sizes: expected at least 2 agents in every round without evolve.archive
population.sizes=[8, 4, 0]
    no more agents can leave than there are
population.sizes=half
    population.sizes: expected null, "constant" or a list of
engine.offload_adapters=true
    engine.offload_adapters: expected false with fewer than 3 parts of the population (1), got true
engine.offload_adapters=true && engine.overlap=true
    of the population (2), got true; set engine.shards to 3 or more
engine.offload_adapters=true && engine.zero=2
    engine.offload_adapters: expected false with zero 2, got true; leave it out
engine.zero=3 && engine.base=sharded
    engine.base: expected replicated with zero 3, got the string 'sharded'; leave it out
engine.zero=2 && engine.shards=2
    engine.shards: expected null or 1 with zero 2, got 2; leave it out
engine.zero=2 && engine.overlap=true
    engine.overlap: expected false with zero 2, got true; leave it out
engine.zero=2 && engine.dtype=float16
    engine.dtype: expected auto, bfloat16 or float32
record.trackers=[wandb, wandb]
    record.trackers[1].kind: expected each kind once
record.storage=sqlite && record.optuna=false
    record.storage: expected null with optuna: false
evolve.hyperparameters.loss_type.choices=[grpo, dapo] && algorithm.loss_type=vespo
    algorithm.loss_type: expected one of grpo, dapo, got vespo; take one of them
evolve.hyperparameters.loss_type.choices=[grpo, dr-grpo]
    evolve.hyperparameters.loss_type.choices: expected 'grpo', 'gspo', 'cispo', 'bnpo', 'dr_grpo',
evolve.hyperparameters.loss_type.choices=[grpo, gspo] && algorithm.importance_sampling_level=token
    algorithm.importance_sampling_level: expected 'sequence' with loss_type='gspo'
"""


def cases(*tables):
    """Yield the overrides and the message of each case; a case has two lines."""
    for table in tables:
        lines = table.strip().split("\n")
        for overrides, message in zip(lines[::2], lines[1::2], strict=True):
            yield overrides.split(" && "), message.strip()


TABLES = (UNKNOWN_KEYS, MALFORMED_OVERRIDES, TYPES_AND_RANGES, NUMBERS, CONTRADICTIONS)


@pytest.mark.parametrize(
    ("overrides", "message"), [*cases(*TABLES), *cases(NAMES_OF_OTHER_LIBRARIES)]
)
def test_a_setting_is_refused_with_its_key_and_a_remedy(overrides, message):
    with pytest.raises(ConfigError) as caught:
        from_dict(MINIMAL, overrides)
    assert caught.value.exit_code == 2
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
