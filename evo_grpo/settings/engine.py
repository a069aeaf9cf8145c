"""The groups `population`, `engine` and `record`: how much, on what, and what is kept of it."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import BeforeValidator, model_validator

from evo_grpo.evolve.sizes import Sizes
from evo_grpo.evolve.start import StartName
from evo_grpo.schema.group import Group, plain, setting
from evo_grpo.schema.problems import Problem, Problems, nearest
from evo_grpo.settings.storage import check_storage, is_url
from evo_grpo.settings.trackers import TrackerConfig, Trackers, problems_of
from evo_grpo.settings.vllm import VLLMSettings


def _start(value: object) -> object:
    """Accept a name, or a list of mappings; one message instead of one per branch of the union."""
    if isinstance(value, list | tuple):
        items = cast("list[object]", list(value))
        if all(isinstance(item, Mapping) for item in items):
            return [plain(item) for item in items]
    names = get_args(StartName)
    if value in names:
        return value
    near = nearest(value, names) if isinstance(value, str) else None
    hint = f" (did you mean {near!r}?)" if near else ""
    raise ValueError(f"{', '.join(map(repr, names))}, or a list with one mapping per agent{hint}")


Init = Annotated[StartName | list[dict[str, Any]], BeforeValidator(_start)]


def _sizes(value: object) -> object:
    """Accept null, "constant" or integers; one message instead of one per branch of the union."""
    if value is None or value == "constant":
        return value
    items = list(value) if isinstance(value, list | tuple) else []
    if items and all(type(item) is int for item in items):
        return items
    raise ValueError('null, "constant" or a list of integers such as [8, 4, 2]')


AnnotatedSizes = Annotated[Sizes, BeforeValidator(_sizes)]


def _retention(value: object) -> object:
    """Accept a name or a number; one message instead of one per branch of the union."""
    if (isinstance(value, str) and value in RETAINED) or (type(value) is int and value >= 1):
        return value
    raise ValueError("'all', 'last', 'best', or a number of rounds, at least 1")


RETAINED = ("all", "last", "best")
AnnotatedRetention = Annotated[Literal["all", "last", "best"] | int, BeforeValidator(_retention)]
AnnotatedStorage = Annotated[str | None, BeforeValidator(check_storage)]


class StopConfig(Group):
    """What ends the training of a run before its last round; whichever comes first."""

    fitness: float | None = setting(
        None, "The best fitness of a round is so much or more; null sets no such rule."
    )
    patience: int | None = setting(
        None,
        "So many rounds in a row brought no better fitness than the best before them, be it by a "
        "hair.",
        ge=1,
    )
    minutes: float | None = setting(
        None,
        "The rounds took so many minutes together, those before a stop too, pauses not. The one "
        "rule that may end the same run at another round the next time.",
        gt=0,
    )
    tokens: float | None = setting(
        None, "So many tokens were sampled in training and evaluations.", gt=0
    )

    @property
    def is_empty(self) -> bool:
        """Whether no rule is set."""
        return all(value is None for _, value in self)


class PopulationConfig(Group):
    """How many agents train for how long."""

    size: int = setting(8, "Agents.", ge=1, remedy="it counts agents")
    rounds: int = setting(
        6, "Rounds: training, then evaluation, then selection and exploration.", ge=1
    )
    steps_per_round: int = setting(4, "GRPO steps of every agent in a round.", ge=1)
    stop: StopConfig = setting(
        StopConfig(),
        "Rules that end training before the last of `rounds`, after the round in which one of them "
        "holds; then winner and base are judged as at any end. "
        "`evo-grpo resume RUN --rounds N` goes on all the same.",
    )
    sizes: AnnotatedSizes = setting(
        None,
        "Agents by round. null halves them after every round, down to 2 (with selection `none`, "
        "which lets nobody go, it keeps them all); a list such as [8, 4, 2] begins with `size`, "
        "and its last number repeats; `constant` keeps them all. What leaves gives its completions "
        "to the others, as more prompts per step: rows and time per round stay the same.",
    )
    init: Init = setting(
        "latin_hypercube",
        "What agents begin with. `latin_hypercube`: agent 0 has the values of `algorithm`, the "
        "others cover the ranges of `evolve.hyperparameters` evenly. `sample`: the others draw "
        "from the ranges, each for itself. `same`: all have the values of `algorithm`. Or a list "
        "of one mapping per agent, for instance `[{}, {lr: 1.0e-4}, {lr: 3.0e-3, beta: 0.01}]`.",
    )


class EngineConfig(Group):
    """Where and how it computes."""

    device: str = setting(
        "auto",
        "`auto` takes the first CUDA device where there is one; or `cpu`, `cuda`, `cuda:1`, `mps`.",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Weights of the base: `auto` is float32 on the CPU and bfloat16 on CUDA."
    )
    quantization: Literal["int8", "nf4"] | None = setting(
        None,
        "Keep the weights of the base's linear layers in 8 bits (`int8`) or 4 (`nf4`); adapters "
        "and what they train stay in float32. Needs bitsandbytes. null keeps them in `dtype`.",
    )
    threads: int | None = setting(None, "CPU threads; null leaves it to torch.", ge=1, le=1024)
    shards: int | None = setting(
        None,
        "Parts of the population that are computed apart, each in batches of its own. The result "
        "depends on them in the last digits, and on the number of processes not at all; null takes "
        "as many as the run begins with processes.",
        ge=1,
    )
    base: Literal["replicated", "sharded"] = setting(
        "replicated",
        "`replicated`: each process has the whole base. `sharded`: each has a part of every layer, "
        "which all put together for each pass; for a base larger than a device, and slower.",
    )
    zero: Literal[2, 3] | None = setting(
        None,
        "Train with DeepSpeed's ZeRO: `2` divides moments and gradients of an adapter among the "
        "processes, `3` the layers of the base too. All processes train each agent together, one "
        "agent after the other. null trains all agents at once, with AdamW.",
    )
    rollout: Literal["native", "vllm"] = setting(
        "native",
        "What generates: `native`, the engine built in, or `vllm`, which has to be installed.",
    )
    vllm: VLLMSettings = setting(VLLMSettings(), "How vLLM generates.")
    max_tokens_per_microbatch: int | None = setting(
        None,
        "Padded tokens in one forward and backward pass; fewer need less memory. null goes by the "
        "model: 2,048 (large) to 8,192 (small) on a CPU, 4,096 on other devices.",
        ge=1,
    )
    max_rows_per_microbatch: int | None = setting(
        None, "Rows in one forward and backward pass; null sets no such bound.", ge=1
    )
    max_decode_rows: int = setting(
        1024, "Completions decoded at once; fewer need less memory for keys and values.", ge=1
    )
    max_decode_prompts: int | None = setting(
        None, "Prompts decoded at once; null sets no such bound.", ge=1
    )
    gradient_checkpointing: bool = setting(
        False, "Recompute activations in the backward pass: slower, with less memory."
    )
    compile: str | None = setting(
        None,
        "Mode of torch.compile for the base's layers that carry no adapter, for instance "
        "`default`; null compiles nothing.",
        min_length=1,
    )

    @property
    def each_alone(self) -> bool:
        """Whether no process waits for another within a step."""
        return self.base == "replicated" and self.zero is None


class RecordConfig(Group):
    """What a run keeps."""

    completions: int = setting(2, "Sample completions kept for each agent and round.", ge=0)
    metrics: bool = setting(
        True, "Keep what each GRPO step measured of each agent; else only the means of rounds stay."
    )
    checkpoints: AnnotatedRetention = setting(
        "all",
        "`all` keeps every round's checkpoints, `last` those of the last round, a number those of "
        "so many last rounds, `best` those of the last round and of each earlier one's best "
        "agent. Unless all stay, the best agent ever has a copy in checkpoints/best.",
    )
    optuna: bool = setting(True, "Record one Optuna trial per agent and round.")
    storage: AnnotatedStorage = setting(
        None,
        "Where the trials are kept. null: Optuna's journal in the run folder. `sqlite`: a SQLite "
        "file there. `postgresql+psycopg://user@host:port/database`: a server, on which each run "
        "has a study of its own; its password comes from PGPASSWORD or ~/.pgpass. "
        "`sqlite:///path`: a SQLite file of yours for several runs.",
    )

    trackers: Trackers = setting(
        factory=list[TrackerConfig],
        meaning="Trackers that follow the run, each a kind or a mapping: `[tensorboard, wandb]`. "
        "With `metrics: false` they get the rounds and no steps.",
    )

    @model_validator(mode="after")
    def _trials_to_keep(self) -> Self:
        if self.storage is not None and not self.optuna:
            text = "expected null, for optuna is false and no trial is recorded; remove one of them"
            raise Problems(Problem(("storage",), text))
        if found := list(problems_of(self.trackers)):
            raise Problems(*(p._replace(path=("trackers", *p.path)) for p in found))
        return self

    @property
    def readers(self) -> list[str]:
        """Names of the readers that follow the run: its trackers, and a database of its trials."""
        trials = ["optuna"] if self.optuna and is_url(self.storage) else []
        return [*(tracker.kind for tracker in self.trackers), *trials]

    def keeps_best_apart(self, *, archive: bool) -> bool:
        """Return whether the best agent ever has a copy in checkpoints/best."""
        return archive or self.checkpoints != "all"
