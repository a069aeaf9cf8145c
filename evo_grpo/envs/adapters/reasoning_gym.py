"""Tasks of the package reasoning-gym: generated questions with exact scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evo_grpo.envs.builtin.dataset import divide
from evo_grpo.envs.data.tables import SPLITS, DatasetRow
from evo_grpo.envs.family import Family, arguments, check_name, check_names
from evo_grpo.envs.messages import listed
from evo_grpo.envs.packages import global_generators_kept, load_package
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError
from evo_grpo.schema.group import Group, setting
from evo_grpo.seeding import derive
from evo_grpo.settings import EnvConfig

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset  # for annotations only: an extra


FAMILY = Family("name")
PACKAGE = "reasoning-gym"
MAX_OUTPUT_TOKENS = 64


class Sizes(Group):
    """What `env.args` takes beside the settings of a dataset."""

    train_size: int = setting(1000, "Questions to learn from.", ge=1)
    validation_size: int = setting(128, "Questions for selection.", ge=1)
    test_size: int = setting(256, "Questions of the final evaluation.", ge=1)


def build(name: str, env: EnvConfig, seed: int) -> Task:
    """Build the task of a dataset, with the columns question, answer and metadata.

    `env.args` has the sizes of the splits and the settings of the dataset. For "composite",
    `datasets` is a list of mappings with name, weight and config. No question occurs twice. If the
    dataset has too few different questions, such as sums of two digits, all splits are smaller, in
    the same proportions.
    """
    sizes = {key: value for key, value in env.args.items() if key in Sizes.model_fields}
    args = {key: value for key, value in env.args.items() if key not in sizes}
    counts = arguments(sizes, Sizes)
    shares = {split: getattr(counts, f"{split}_size") for split in SPLITS}
    if unset := {"size", "seed"} & args.keys():
        raise ConfigError(
            f"env.args.{min(unset)}: is not set here; use train_size, validation_size and "
            "test_size, and the run's seed"
        )
    source = _create(
        name, {**args, "size": sum(shares.values()), "seed": derive(seed, name) % 2**31}
    )
    try:
        with global_generators_kept():
            entries = [dict(source[number]) for number in range(len(source))]
    except Exception as error:  # settings that pass the dataset's own check may still fail here
        raise ConfigError(
            f'env.args: "{name}" makes no questions with these settings: '
            f"{type(error).__name__}: {error}"
        ) from error
    rows: dict[str, DatasetRow] = {entry["question"]: entry for entry in entries}
    divided = divide(list(rows.values()), shares, lambda row: row["question"], seed)
    return Task(
        name=f"reasoning_gym:{name}",
        splits={split: divided[split] for split in SPLITS},
        rewards=(RewardFunction("score_answer", _Scorer(source)),),
        templates={None: Template.of([{"role": "user", "content": "{question}"}])},
        max_output_tokens=MAX_OUTPUT_TOKENS,
    )


class _Scorer:
    """Scores a completion, or its part between <answer> tags, by the scoring of the dataset."""

    def __init__(self, source: ProceduralDataset) -> None:
        self._source = source

    def __call__(self, completion: str, question: str, answer: object, metadata: object) -> float:
        from reasoning_gym.utils import extract_answer

        agent_answer = extract_answer(completion) or completion.strip()
        entry = {"question": question, "answer": answer, "metadata": metadata}
        try:
            return float(self._source.score_answer(agent_answer, entry))
        except Exception:  # several tasks fail to parse free text, each in its own way
            return 0.0


def _create(dataset: str, settings: dict[str, Any]) -> ProceduralDataset:
    kind = f"reasoning_gym:{dataset}"
    # Imported here because it is an extra and loads for a second.
    package = load_package(kind, "reasoning_gym", PACKAGE, 'pip install "evo-grpo[envs]"')
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    check_name(kind, PACKAGE, dataset, DATASETS)
    fields = sorted({*DATASETS[dataset][1].__dataclass_fields__} - {"size", "seed"})
    names = [name for name in settings if name not in ("size", "seed")]
    check_names(kind, names, [*fields, *(f"{split}_size" for split in SPLITS)])
    try:
        if dataset == "composite" and settings.get("datasets"):
            settings["datasets"] = [DatasetSpec(**spec) for spec in settings["datasets"]]
        with global_generators_kept():
            return package.create_dataset(dataset, **settings)
    except (AssertionError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f'env.args: "{dataset}" refuses these settings: {error or type(error).__name__}; '
            f"it has: {listed(fields)}"
        ) from error
