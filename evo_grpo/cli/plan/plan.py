"""Makes the plan of a run before it starts: rows, tokens and bytes."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

from evo_grpo.envs import finding, registry, template_keywords, thinking
from evo_grpo.envs.data.tables import LazyRows
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError
from evo_grpo.settings import EngineConfig, RunConfig, evaluations, record, trackers, warnings
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS, DEFAULT_PROMPTS
from evo_grpo.training.shortages import few_prompts, shortages
from evo_grpo.training.sizing import machine, model_size, prompt_lengths
from evo_grpo.training.sizing.cards import Gpu
from evo_grpo.training.sizing.duration import Duration, duration_of
from evo_grpo.training.sizing.memory import MemoryPlan, base_bytes, stored_bytes, trained_bytes
from evo_grpo.training.strategies import check_strategies, task_of


class Plan(NamedTuple):
    """The plan of a run. Token counts are upper bounds: completions may end early.

    Attributes:
        rows: Rows per split; empty for a multi-turn environment.
        turns: Most completions in one row: 1, or the most turns of an episode.
        places: Number of agents in each round.
        decisions: Finished rounds after which the run decides, including the last.
        prompts_per_step: Prompts, or episode seeds, of one agent's step in the first round.
        group_sizes: Least and most completions per prompt of an agent.
        rows_per_step: Rows of all agents in one step, the same in every round.
        test_prompts: Prompts on which the base and the best agent are tested at the end.
        tokens_per_round: Most training tokens per round, over all agents.
        evaluation_tokens: Most tokens of the evaluations after each round: those of its agents, of
            racing, and of the comparison with the archive.
        finalists: Most agents that the final comparison compares; 0 if the run has none.
        final_tokens: Most tokens of the final comparison.
        test_tokens: Most tokens of base and best agent on the test prompts.
        adapter_parameters: Parameters of one adapter, or None if unknown.
        memory: Memory plans of one process, one for each possible dtype of the base; empty if
            unknown. For a CUDA device of unknown size, few rows and tokens at once are assumed.
        fit: Whether the run fits into the memory of the GPU that it is planned for, or else of this
            machine; None if the need or the memory is unknown.
        prompts: Lengths of the prompts; None for a task that generates its rows.
        calls: The call of each reward function for the first row; empty for a task that generates
            its rows.
        warnings: Sentences on settings without effect, doubtful settings, shortages of rows or
            memory, and missing packages.
    """

    config: RunConfig
    task: str
    rows: dict[str, int]
    turns: int
    places: tuple[int, ...]
    decisions: tuple[int, ...]
    prompts_per_step: int
    group_sizes: tuple[int, int]
    rows_per_step: int
    max_output_tokens: int
    validation_prompts: int
    test_prompts: int
    tokens_per_round: int
    evaluation_tokens: tuple[int, ...]
    finalists: int
    final_tokens: int
    test_tokens: int
    base: model_size.ModelSize
    adapter_parameters: int | None
    memory: tuple[MemoryPlan, ...]
    fit: machine.Fit | None
    prompts: prompt_lengths.PromptLengths | None
    first: prompt_lengths.FirstPrompt | None
    calls: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def total_tokens(self) -> int:
        """Most tokens of the whole run, in training and evaluation."""
        training = self.config.population.rounds * self.tokens_per_round
        return training + sum(self.evaluation_tokens) + self.final_tokens + self.test_tokens

    @property
    def duration(self) -> Duration | None:
        """The time of the run on the GPU that it was planned for; None if unknown."""
        tokens = (*self.evaluation_tokens, self.final_tokens, self.test_tokens)
        return (
            None
            if self.fit is None
            else duration_of(
                self.config,
                self.fit,
                prompt=0 if self.prompts is None else self.prompts.most,
                turns=self.turns,
                rows=self.rows_per_step,
                evaluated=[count / (self.turns * self.max_output_tokens) for count in tokens],
            )
        )

    @property
    def bytes_per_agent(self) -> int | None:
        """Bytes of an agent in training, with its reference adapter, if any; None if unknown."""
        parameters, reference = self.adapter_parameters, self.config.algorithm.separate_reference
        return None if parameters is None else trained_bytes(parameters, reference=reference)

    @property
    def base_bytes(self) -> dict[str, int]:
        """Bytes of the base by dtype; `engine.dtype: auto` has the dtypes of the CPU and CUDA."""
        quantization = self.config.engine.quantization
        names = [memory.dtype for memory in self.memory] or list(machine.dtypes(self.config))
        sizes = {name: base_bytes(self.base, name, quantization) for name in names}
        return {name: size for name, size in sizes.items() if size is not None}

    @property
    def checkpoint_bytes(self) -> int | None:
        """Most bytes of all checkpoints: adapters and optimizer states; None if unknown."""
        parameters, reference = self.adapter_parameters, self.config.algorithm.separate_reference
        if parameters is None:
            return None
        policy = self.config.record.checkpoints
        # Rounds whose checkpoints are kept at once; no round has more agents than those before it.
        count = len(self.places) if policy == "all" else policy if isinstance(policy, int) else 1
        checkpoints = sum(self.places[:count])
        if policy == "best":
            checkpoints += len(self.places) - 1
        best = int(self.config.record.keeps_best_apart(archive=self.config.evolve.keeps_archive))
        mean = int(self.finalists > 1 and self.places[-1] > 1)
        return (checkpoints + best + mean) * stored_bytes(parameters, reference=reference)


def make_plan(config: RunConfig, *, gpu: Gpu | None = None, online: bool = False) -> Plan:
    """Make the plan of a run: count the rows of its task, then read the size of its model.

    Code that the configuration names is not imported. `gpu` is the card to plan for, by default the
    devices of this machine; with `online`, the small files of a hub model may be fetched.

    Raises:
        EvoGrpoError: The task's rows, columns or rewards, a user's strategy, or the model cannot be
            used; or a database driver or a tracker's package is not installed.
    """
    config = _check_first(config)
    task = task_of(config, finding.find_function)
    output_tokens = DEFAULT_OUTPUT_TOKENS if task is None else task.max_output_tokens
    config = config.settled(output_tokens)
    check_strategies(config.evolve)
    config, base, failure = _read_base(config, online=online)
    lengths, first_prompt, dropped = _read_prompts(config, task, base)
    algorithm, fitness = config.algorithm, config.evolve.fitness
    longest = algorithm.longest_output(config.search_space()) or output_tokens
    prompts = algorithm.prompts_per_step or DEFAULT_PROMPTS
    # Episodes start from seeds, so a multi-turn environment never runs out of prompts.
    rows = {} if task is None else _rows_of(task, lengths)
    validation = min(fitness.prompts, rows.get("validation", fitness.prompts))
    test = min(fitness.test_prompts, rows.get("test", fitness.test_prompts))
    turns = config.env.max_turns if task is None else 1
    row_tokens = turns * longest
    counts = evaluations.count_evaluations(config.population, config.evolve)
    between, final = min(fitness.in_between, validation), counts.finalists * validation
    fit, memory = _memory(config, base, longest, gpu)
    return Plan(
        config=config,
        task=config.env.kind if task is None else task.name,
        rows=rows,
        turns=turns,
        places=counts.places,
        decisions=counts.decisions,
        prompts_per_step=prompts,
        group_sizes=_group_sizes(config),
        rows_per_step=config.population.size * prompts * algorithm.group_size,
        max_output_tokens=longest,
        validation_prompts=validation,
        test_prompts=test,
        tokens_per_round=_rows_per_round(config, prompts) * row_tokens + _replacing_tokens(config),
        evaluation_tokens=tuple(
            (whole * validation + some * between) * fitness.per_prompt(fitness.samples) * row_tokens
            for whole, some in zip(counts.whole, counts.between, strict=True)
        ),
        finalists=counts.finalists,
        final_tokens=final * fitness.per_prompt(fitness.final_samples) * row_tokens,
        test_tokens=2 * test * fitness.per_prompt(fitness.test_samples) * row_tokens,
        base=base,
        adapter_parameters=model_size.lora_parameters(base, config.largest_lora),
        memory=memory,
        fit=fit,
        prompts=lengths,
        first=first_prompt,
        calls=() if task is None else _calls(task),
        warnings=(
            *warnings(config),
            *((f"model {base.name}: {base.note}",) if failure and base.parameters is None else ()),
            *shortages(rows, prompts, config.evolve.fitness),
            *(() if task is None else few_prompts(task)),
            *(() if fit is None or fit.fits else (fit.sentence(),)),
            *_of_models(config),
            *dropped,
            *_missing_packages(config.engine),
        ),
    )


def _read_base(
    config: RunConfig, *, online: bool
) -> tuple[RunConfig, model_size.ModelSize, str | None]:
    """Return the settings with those of `model.adapter`, the size of the base, and a hub error.

    The error says why the hub did not answer; it is None if the hub answered or was not asked.
    """
    failure = model_size.fetch_small_files(config.model.name) if online else None
    if online and failure is None:
        for reward in config.env.reward_models:
            model_size.fetch_small_files(reward.name)
    base = model_size.read_model_size(config.model.name)
    if failure is not None and base.parameters is None:
        base = base._replace(note=failure)
    if config.model.adapter is not None:
        # Imported here: it loads PEFT.
        from evo_grpo.training.starting import with_adapter

        model = with_adapter(config.model, base, config.search_space().names())
        config = config.model_copy(update={"model": model})
    model_size.check_adapters_fit(config.model, config.largest_lora, base)
    return config, base, failure


def _missing_packages(engine: EngineConfig) -> Iterator[str]:
    """Yield a warning for each setting whose package is missing, without importing packages."""
    if engine.quantization is not None and find_spec("bitsandbytes") is None:
        yield (
            f"engine.quantization is {engine.quantization}, and this Python has no bitsandbytes: a "
            'run will be refused here; pip install "evo-grpo[bitsandbytes]", or leave it out'
        )
    yield from engine.rollout_settings.missing()


def _check_first(config: RunConfig) -> RunConfig:
    """Check packages and the environment, and return the settings.

    Run folders in `population.init` are replaced by the values of their agents.
    """
    record.check_driver(config.record.storage)
    trackers.check_trackers(config.record.trackers)
    if registry.is_multi_turn(config.env.kind):
        registry.check_multi_turn(config.env, config.seed)
    if not isinstance(config.population.init, dict):
        return config
    # Imported here: the order of a leaderboard needs numpy.
    from evo_grpo.record.history import resolved_start

    population, hparams, space = config.population, config.first_hparams(), config.search_space()
    init = resolved_start(population.init, hparams, space, population.size, config.seed)
    return config.replace(population=population.replace(init=init))


def _of_models(config: RunConfig) -> Iterator[str]:
    """Yield warnings: keywords that the chat template ignores, reward models of unknown size."""
    for reward in config.env.reward_models:
        if model_size.classifier_parameters(reward.name) is None:
            yield (
                f"env.reward: the memory leaves out the reward model {reward.name}, whose size is "
                "unknown until it is downloaded"
            )
    keywords = config.env.chat_template_kwargs
    yield from template_keywords.ignored_keywords(
        prompt_lengths.chat_template_of(config.model.name) if keywords else None, keywords
    )


def _memory(
    config: RunConfig, base: model_size.ModelSize, longest: int, gpu: Gpu | None
) -> tuple[machine.Fit | None, tuple[MemoryPlan, ...]]:
    """Return `Plan.fit` and `Plan.memory`; completions have at most `longest` tokens."""
    setup = machine.setup_here(config, base, longest, gpu)
    fit = None if setup is None else machine.fit_of(config, setup)
    memory: list[MemoryPlan | None] = []
    for dtype, device in machine.dtypes(config, gpu).items():
        if fit is not None and fit.setup.dtype == dtype:
            memory.append(fit.plan)
            continue
        # Of an unknown device: a run chooses its limits by the memory.
        low_limits = (
            zip(machine.LIMITS, (machine.FEW_ROWS, machine.FEW_TOKENS), strict=True)
            if device == "cuda"
            else ()
        )
        chosen = {name: value for name, value in low_limits if getattr(config.engine, name) is None}
        memory.append(machine.Setup(base, longest, dtype, device).plan(config, **chosen))
    return fit, tuple(plan for plan in memory if plan is not None)


def _rows_per_round(config: RunConfig, prompts: int) -> int:
    """Return the most rows of a round: whole groups, at least one group per agent and step."""
    least, most = _group_sizes(config)
    steps = config.population.steps_per_round
    planned = config.population.size * prompts * config.algorithm.group_size * steps
    rounding = 0 if least == most == config.algorithm.group_size else most // 2
    return max(planned + rounding, config.population.size * steps * most)


def _replacing_tokens(config: RunConfig) -> int:
    """Return the most tokens of a round that dynamic sampling spends on replacing groups."""
    tokens = config.algorithm.dynamic_sampling_tokens or 0
    return tokens * config.population.size * config.population.steps_per_round


def _read_prompts(
    config: RunConfig, task: Task | None, base: model_size.ModelSize
) -> tuple[prompt_lengths.PromptLengths | None, prompt_lengths.FirstPrompt | None, list[str]]:
    """Return the lengths of the prompts, the first prompt, and warnings about the template."""
    name = config.model.name
    chats = task is None or task.template.conversation is not None
    if chats and prompt_lengths.has_chat_template(name) is False:
        # A multi-turn environment makes its own prompts.
        raw = "" if task is None else ', or a raw text: env.prompt: "{question}\\nA:"'
        raise ConfigError(
            f"env.kind: the messages of {config.env.kind!r} need a chat template, and the "
            f"tokenizer of {name!r} has none; take a model that has one{raw}"
        )
    if task is None:
        return None, None, []
    contexts = [
        context for context in (config.algorithm.max_model_len, base.context) if context is not None
    ]
    vocabulary = None if base.shape is None else base.shape.vocabulary or None
    longest = config.algorithm.longest_output(config.search_space()) or task.max_output_tokens
    return prompt_lengths.read_prompts(task, name, min(contexts, default=None), vocabulary, longest)


def _rows_of(task: Task, lengths: prompt_lengths.PromptLengths | None) -> dict[str, int]:
    """Return the number of rows of each split, less those that `env.too_long: drop` leaves out."""
    rows = {str(split): len(split_rows) for split, split_rows in task.splits.items()}
    if task.too_long != "drop" or lengths is None or lengths.read < lengths.rows:
        return rows
    return {split: count - lengths.too_long.get(split, 0) for split, count in rows.items()}


def _calls(task: Task) -> tuple[str, ...]:
    """Return the call of each reward function for the first row, as code; () for generated rows."""
    if isinstance(task.splits["train"], LazyRows):
        return ()
    # Imported here: it loads numpy.
    from evo_grpo.envs.rewards.scoring import shown_calls

    row = task.splits["train"][0]
    if task.thinking is not None:
        row = {**row, thinking.COLUMN: "..."}
    return tuple(shown_calls(task.rewards, row))


def _group_sizes(config: RunConfig) -> tuple[int, int]:
    space, size = config.search_space(), config.algorithm.group_size
    if "group_size" not in space.names():
        return size, size
    return int(space["group_size"].min), int(space["group_size"].max)


def plan_document(plan: Plan, source: str) -> dict[str, Any]:
    """Return a plan as plain values: tokens are upper bounds, sizes are bytes, None is unknown."""
    fit = plan.fit
    return {
        "file": source,
        "config": plan.config.model_dump(mode="json"),
        "task": plan.task,
        "rows": plan.rows,
        "prompt_tokens": None if plan.prompts is None else plan.prompts._asdict(),
        "first_prompt": None if plan.first is None else plan.first._asdict(),
        "reward_calls": list(plan.calls),
        "places": list(plan.places),
        "decisions": list(plan.decisions),
        "rows_per_step": plan.rows_per_step,
        "tokens": {
            "a_round": plan.tokens_per_round,
            "evaluations": list(plan.evaluation_tokens),
            "final_comparison": plan.final_tokens,
            "test": plan.test_tokens,
            "run": plan.total_tokens,
        },
        "base": {
            "name": plan.base.name,
            "architecture": plan.base.architecture,
            "parameters": plan.base.parameters,
            "context": plan.base.context,
            "bytes": plan.base_bytes,
        },
        "adapter_parameters": plan.adapter_parameters,
        "bytes_per_agent": plan.bytes_per_agent,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "memory": [
            {
                "dtype": memory.dtype,
                "peak": memory.peak,
                "parts": {part.name: part.bytes for part in memory.parts},
            }
            for memory in plan.memory
        ],
        "fit": fit
        and {
            "place": fit.setup.place,
            "bytes": fit.setup.capacity,
            "fits": fit.fits,
            "chosen": dict(fit.chosen),
            "proposal": fit.proposal and dict(fit.proposal.changes),
        },
        "seconds": plan.duration and plan.duration._asdict(),
        "warnings": list(plan.warnings),
    }
