"""What a run will do and need, worked out before it starts: rows, tokens, bytes, files."""

from __future__ import annotations

from typing import NamedTuple

from evo_grpo.cli.plan.shapes import BaseShape, lora_parameters, read_shape
from evo_grpo.settings import RunConfig, warnings

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# PEFT keeps adapters in float32 over a base of any dtype: weight, gradient and two moments of Adam.
TRAINED_BYTES = 4 * (1 + 1 + 2)
STORED_BYTES = 4 * (1 + 2)


class Plan(NamedTuple):
    """The plan of a run. Tokens are sampled ones, an upper bound: completions may end earlier.

    Attributes:
        config: What it was made from.
        task: Name of the task.
        rows: Rows of each split; empty for a game, which has none.
        turns: Most completions in one row: 1, or the turns of a game.
        group_sizes: Least and greatest completions per prompt that an agent may have.
        rows_per_step: Most rows of all agents in one step.
        max_output_tokens: Longest completion.
        tokens_per_round: Most tokens sampled to train on, per round, by all agents.
        evaluation_tokens: Most tokens sampled to measure fitness, per round, by all agents.
        test_tokens: Most tokens sampled at the end, by base and best agent.
        base: The base model.
        adapter_parameters: Weights of one adapter, or None when unknown.
        warnings: One sentence for each setting that cannot have its effect.
    """

    config: RunConfig
    task: str
    rows: dict[str, int]
    turns: int
    group_sizes: tuple[int, int]
    rows_per_step: int
    max_output_tokens: int
    tokens_per_round: int
    evaluation_tokens: int
    test_tokens: int
    base: BaseShape
    adapter_parameters: int | None
    warnings: tuple[str, ...]

    @property
    def total_tokens(self) -> int:
        """Most tokens of the whole run."""
        per_round = self.tokens_per_round + self.evaluation_tokens
        return self.config.population.rounds * per_round + self.test_tokens

    @property
    def bytes_per_agent(self) -> int | None:
        """Adapter, gradient and Adam state of one agent."""
        known = self.adapter_parameters
        return None if known is None else known * TRAINED_BYTES

    @property
    def base_bytes(self) -> dict[str, int]:
        """Bytes of the base by dtype: one, or with `auto` that of the CPU and that of CUDA."""
        dtype = self.config.engine.dtype
        names = ["float32", "bfloat16"] if dtype == "auto" else [dtype]
        if dtype == "auto" and self.config.engine.device == "cpu":
            names = ["float32"]
        known = self.base.parameters
        return {} if known is None else {name: known * DTYPE_BYTES[name] for name in names}

    @property
    def checkpoint_bytes(self) -> int | None:
        """Most bytes of all checkpoints together: adapters and optimizer states."""
        if self.adapter_parameters is None:
            return None
        population, kept = self.config.population, self.config.record.checkpoints
        rounds = population.rounds if kept == "all" else 1
        return rounds * population.size * self.adapter_parameters * STORED_BYTES


def make_plan(config: RunConfig) -> Plan:
    """Work out a plan: builds the task, then reads the size of the model.

    Raises:
        EvoGrpoError: Whatever is wrong with the task's rows, columns and rewards, or the model.
    """
    work = _work(config)
    base = read_shape(config.model.name)
    population, algorithm, fitness = config.population, config.algorithm, config.evolve.fitness
    longest = algorithm.max_output_tokens or work.output_tokens
    group_sizes = _group_sizes(config)
    per_step = population.size * algorithm.prompts_per_step * group_sizes[1]
    # A game has no rows that could run out: its prompts are the seeds of its episodes.
    validation = min(fitness.prompts, work.rows.get("validation", fitness.prompts))
    test = min(fitness.test_prompts, work.rows.get("test", fitness.test_prompts))
    per_row = work.turns * longest
    return Plan(
        config=config,
        task=work.name,
        rows=work.rows,
        turns=work.turns,
        group_sizes=group_sizes,
        rows_per_step=per_step,
        max_output_tokens=longest,
        tokens_per_round=population.steps_per_round * per_step * per_row,
        evaluation_tokens=population.size * validation * fitness.samples * per_row,
        test_tokens=2 * test * fitness.test_samples * per_row,
        base=base,
        adapter_parameters=lora_parameters(base, config.model.lora),
        warnings=(*warnings(config), *_shortages(config, work.rows, base, longest)),
    )


class _Work(NamedTuple):
    """What the plan needs to know of a task: rows by split, tokens of a completion, turns."""

    name: str
    rows: dict[str, int]
    output_tokens: int
    turns: int = 1


def _work(config: RunConfig) -> _Work:
    # Imported here: a task may need pandas or reasoning-gym, and nothing else of this module does.
    from evo_grpo.envs.registry import build_multi_turn, build_task, is_multi_turn
    from evo_grpo.envs.task import DEFAULT_MAX_OUTPUT_TOKENS

    if is_multi_turn(config.env.kind):
        build_multi_turn(config.env, config.seed)
        return _Work(config.env.kind, {}, DEFAULT_MAX_OUTPUT_TOKENS, config.env.max_turns)
    task = build_task(config.env, config.seed)
    rows = {str(split): len(its_rows) for split, its_rows in task.splits.items()}
    return _Work(task.name, rows, task.max_output_tokens)


def _group_sizes(config: RunConfig) -> tuple[int, int]:
    given = config.evolve.hyperparameters.get("group_size")
    own = config.algorithm.group_size
    return (own, own) if given is None else (int(given.min), int(given.max))


def _shortages(config: RunConfig, rows: dict[str, int], base: BaseShape, longest: int) -> list[str]:
    """Return what the task or the model has too little of."""
    found: list[str] = []
    for key, split, wanted in (
        ("algorithm.prompts_per_step", "train", config.algorithm.prompts_per_step),
        ("evolve.fitness.prompts", "validation", config.evolve.fitness.prompts),
        ("evolve.fitness.test_prompts", "test", config.evolve.fitness.test_prompts),
    ):
        if wanted > rows.get(split, wanted):
            found.append(f"{key} is {wanted}, but {split} has {rows[split]} rows")
    context = config.algorithm.max_model_len or base.context
    if context is not None and longest >= context:
        found.append(
            f"completions of up to {longest} tokens leave no room for a prompt in a context of "
            f"{context}; lower algorithm.max_output_tokens"
        )
    return found
