"""What a checkpoint says of its agent comes back, and is JSON before a file is touched."""

import pickle
from hashlib import sha256

import numpy as np
import pytest
import torch
from peft import LoraConfig
from small_run import small

from evo_grpo import CISPO, GRPO, GSPO, run
from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.population.checkpoints.write import snapshot_agent
from evo_grpo.training.assemble import prepare
from evo_grpo.types import Score

LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
SUMS = {"model": "tiny-sums", "lora": LORA, "max_output_tokens": 3, "device": "cpu"}
FIRST = "checkpoints/round-0000/agent-00"


def one_round(**algorithm):
    given = {f"algorithm__{name}": value for name, value in algorithm.items()}
    return small(population__rounds=1, population__size=2, **given)


@pytest.mark.filterwarnings("error:checkpoint")
@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {
            "loss_type": "dr_grpo",
            "max_output_tokens": 4,
            "min_output_tokens": 2,
            "max_model_len": 40,
            "adv_norm": "mean_only",
        },
    ],
)
def test_an_agent_of_a_run_comes_back_with_all_its_settings(tmp_path, algorithm):
    config = one_round(**algorithm)
    cohort = prepare(config).cohort
    loaded = GRPO.load(run(config, out=tmp_path / "r") / FIRST, device="cpu")
    assert loaded.settings == cohort.settings
    assert loaded.cohort.seed == config.seed
    assert loaded.hp_config == cohort.hp_config
    assert loaded.cohort.base.dtype is cohort.base.dtype


def test_the_kind_of_a_run_is_the_class_of_its_agents(tmp_path):
    folder = run(one_round(kind="gspo", loss_type="luspo"), out=tmp_path / "r") / FIRST
    assert GSPO.load(folder).cohort.learner.loss.loss_type == "luspo"
    for cls in (GRPO, CISPO):
        with pytest.raises(ConfigError, match=f"{cls.__name__}.load: .* is of GSPO"):
            cls.load(folder)


def test_a_path_that_no_folder_can_have_is_named():
    with pytest.raises(CheckpointError, match=r"^save_checkpoint: path: .* holds a null character"):
        GRPO(**SUMS).save_checkpoint("a\0b")


def test_what_json_cannot_hold_is_refused_before_a_file_is_touched(tmp_path):
    def files():
        found = (path for path in tmp_path.rglob("*") if path.is_file())
        return {path: sha256(path.read_bytes()).hexdigest() for path in found}

    agent = GRPO(**SUMS)
    agent.save_checkpoint(tmp_path / "a")
    before = files()
    with torch.no_grad():
        agent.cohort.slots.parameters("actor_0")[0].add_(1.0)
    agent.state.history.append(Score(np.float32(0.5), 0.1, 4))
    for name in ("a", "b"):
        with pytest.raises(TypeError, match="float32 is not JSON serializable"):
            agent.save_checkpoint(tmp_path / name)
    assert files() == before


def test_the_checkpoint_of_a_run_has_the_reference_that_is_the_agents_own():
    for own in (True, False):
        cohort = prepare(one_round(separate_reference=own, beta=0.1)).cohort
        saved = snapshot_agent(cohort, 0).tensors.reference
        assert (saved is not None) is own
        if saved is not None:
            assert saved.state.keys() == cohort.slots.state("reference_0").keys()


def test_an_agent_that_is_sent_is_pickled_once():
    """Its tensors are views of one buffer, each of which would be pickled with all of it."""
    cohort = prepare(one_round()).cohort
    snapshot = snapshot_agent(cohort, 0)
    state = snapshot.tensors.actor.state
    size = sum(tensor.nbytes for tensor in state.values())
    assert len(pickle.dumps(snapshot.to_send().tensors.actor.state)) < 2 * size + 10_000
    assert len(pickle.dumps(state)) > 4 * size
