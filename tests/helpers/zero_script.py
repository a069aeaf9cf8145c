"""A script as AgileRL's pages have it, with an accelerator; torchrun starts it in each process."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs

import evo_grpo
from evo_grpo.agilerl import GRPO, Mutations, ReasoningGym, finetune_llm_reasoning
from evo_grpo.errors import ConfigError, RunFailedError
from evo_grpo.population.zero.engine import import_deepspeed

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
SMALL = {"group_size": 3, "max_output_tokens": 3, "batch_size": None, "lr": 1e-3, "beta": 0.0}


def exact(completion, answer, question):
    del question
    return float(answer in completion) + len(completion) / 100


def main(folder):
    import_deepspeed(torch.device("cpu"))
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, zero3_init_flag=False),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    rank = accelerator.process_index
    agents = GRPO.population(2, model_name="tiny-sums", accelerator=accelerator, **SMALL)
    first = agents[0]
    assert first.settings.engine.zero == 2
    assert first.cohort.team.size == accelerator.num_processes == 2
    tokenizer = first.cohort.base.tokenizer
    env = ReasoningGym(
        ROWS[:12], ROWS[12:], tokenizer, exact, "{question}", 2, accelerator=accelerator
    )
    assert env.batch_size == 4  # two of each process
    ids, masks = first.get_action(env.batch(0, env.batch_size))
    assert len(ids) == 4
    rewards = torch.arange(12.0).view(4, 3) % 5
    before = [p.detach().clone() for p in first.cohort.slots.parameters("actor_0")]
    metrics = first.learn((ids, masks, rewards))
    assert metrics["updates"] == 1
    after = first.cohort.slots.parameters("actor_0")
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    # Processes that are given different data would part ways.
    with pytest.raises(RunFailedError, match="expected the same on all 2 processes"):
        first.learn((ids, masks, rewards.roll(rank, 1)))
    finetune_llm_reasoning(
        agents, env, max_steps=24, evaluation_interval=1, eval_prompts=2, verbose=False,
        mutation=Mutations(), accelerator=accelerator,
    )  # fmt: skip
    first.save_checkpoint(folder / "agent")
    again = GRPO.load(folder / "agent", accelerator=accelerator)
    own = evo_grpo.GRPO.load(folder / "agent")
    for one in (again, own):
        for mine, theirs in zip(
            one.cohort.slots.parameters("actor_0"),
            first.cohort.slots.parameters("actor_0"),
            strict=True,
        ):
            assert torch.equal(mine, theirs)
    assert (again.settings.engine.zero, own.settings.engine.zero) == (2, None)
    other = evo_grpo.GRPO(model="tiny-sums", lora={"r": 64}, device="cpu")
    other.save_checkpoint(folder / f"other-{rank}")
    with pytest.raises(ConfigError, match="all agents train through one adapter of DeepSpeed's"):
        first.load_checkpoint(folder / f"other-{rank}", merge_lora_configs=True)
    clone = first.clone()
    assert clone.learn((ids, masks, rewards))["updates"] == 1
    with pytest.raises(ConfigError, match="out: expected one process, got 2"):
        agents.train(env, rounds=1, out=folder / "run")
    print("as it should be", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
