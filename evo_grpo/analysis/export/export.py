"""Exports an agent as a PEFT folder with its model card, and pushes it to the Hub in one commit.

The example code on the card runs without this package.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_grpo.analysis.export.contents import (
    ADAPTER,
    CARD,
    OF_ANSWERS,
    WEIGHTS,
    BaseModel,
    Contents,
    adapter_contents,
    check_target,
    find_base,
    is_export_file,
    merged_contents,
    read_adapter_files,
    write_export,
)
from evo_grpo.envs.asking import TaskPrompt, asking
from evo_grpo.envs.conversations import MESSAGES
from evo_grpo.envs.prompts import Template
from evo_grpo.errors import ConfigError, EvoGrpoError, RunFailedError
from evo_grpo.escaping import printable, redacted, shorten
from evo_grpo.record import arms, replay, story
from evo_grpo.record.choice import ChosenAgent, choose_of
from evo_grpo.record.files import writing
from evo_grpo.record.folder import read_config
from evo_grpo.record.wording import count, with_error
from evo_grpo.schema.hparams import Hparams, Value
from evo_grpo.settings import RunConfig
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS
from evo_grpo.types import Mutation, Score

_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_MARKUP = re.compile(r"[\\`*<>\[\]|&~#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""Characters that mark up text within a line of Markdown; not a "_" inside a word."""
PLACEHOLDER = "..."
"""Placeholder for a value that the user has to fill in."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for max_lora_rank."""


@dataclass(frozen=True)
class ExampleCode:
    """The values for the example code on the card of an export.

    Attributes:
        row: An example row, which fills the columns of the template.
        tokens: The greatest number of tokens of an answer in the run.
        pushed: The repository on the Hub, None if the export is not pushed.
        hidden: Number of the user's rows in the template that are replaced by "...".
    """

    base: BaseModel
    contents: Contents
    template: Template
    row: Mapping[str, Any]
    tokens: int
    temperature: float
    pushed: str | None = None
    hidden: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        base: BaseModel,
        contents: Contents,
        config: RunConfig,
        hparams: Hparams,
        pushed: str | None,
    ) -> ExampleCode:
        """Return the values from the run's settings and the agent's hyperparameters."""
        try:
            question = asking(config.env, config.seed, hparams.prompt, show_rows=False)
        except EvoGrpoError:  # the task does not exist any more, or was a Python object
            question = TaskPrompt(Template.of("{prompt}"), DEFAULT_OUTPUT_TOKENS, {})
        max_tokens = hparams.max_output_tokens or config.algorithm.max_output_tokens
        stop = config.algorithm.stop
        return cls(
            base,
            contents,
            question.template,
            {name: question.example.get(name, PLACEHOLDER) for name in question.template.columns()},
            max_tokens or question.max_output_tokens,
            config.evolve.fitness.temperature,
            pushed,
            question.hidden,
            tuple(end for end in stop if isinstance(end, str)),
            tuple(end for end in stop if isinstance(end, int)),
        )

    @property
    def merged(self) -> bool:
        """Whether the export is one model, without an adapter."""
        return self.contents.dtype is not None

    @property
    def continues(self) -> bool:
        """Whether the template ends with the start of an answer, which the model continues."""
        conversation = self.template.conversation
        return conversation is not None and conversation[-1]["role"] == "assistant"

    @property
    def lora_rank(self) -> int:
        """The value of vLLM's max_lora_rank with which vLLM can load the export."""
        rank = self.contents.rank
        return next((limit for limit in VLLM_RANKS if limit >= rank), rank)

    def keywords(self) -> str:
        """Return code for the keyword arguments of the chat template, each after a comma."""
        items = self.template.keywords.items()
        return "".join(f", {name}={value!r}" for name, value in items if name.isidentifier())

    def question(self) -> list[str]:
        """Return lines of code that build a row, and from it the prompt or the messages."""
        row = ", ".join(f"{literal(name)}: {literal(value)}" for name, value in _row(self).items())
        lines = [f"row = {{{row}}}"] if row else []
        if self.template.conversation is None:
            return [*lines, f"prompt = {_filled(self.template.text or '')}"]
        messages = ", ".join(map(_message, self.template.conversation))
        return [*lines, f"messages = [{messages}]"]


def literal(value: object) -> str:
    """Return a value as a Python literal, a string in double quotes if possible."""
    representation = repr(value)
    plain = isinstance(value, str) and representation[0] == "'" and '"' not in representation
    return f'"{representation[1:-1]}"' if plain else representation


def _message(message: Mapping[str, str]) -> str:
    role, content = message["role"], message["content"]
    if role == MESSAGES:
        return f"*row[{literal(content[1:-1])}]"
    return f'{{"role": {literal(role)}, "content": {_filled(content)}}}'


def _filled(text: str) -> str:
    if Template(text=text).columns():
        return f"{literal(text)}.format(**row)"
    return literal(text.replace("{{", "{").replace("}}", "}"))


def _row(example: ExampleCode) -> dict[str, Any]:
    """Return a row that fills the template and whose values can be written as Python literals."""
    row: dict[str, Any] = {}
    chats = example.template.conversations
    for name, value in example.row.items():
        fits = type(value) in (str, int, float, bool)
        messages = [{"role": "user", "content": PLACEHOLDER}]
        row[name] = messages if name in chats else value if fits else PLACEHOLDER
    try:
        example.template.plain(row)
    except EvoGrpoError:  # a format such as {answer:03d}, which takes a number
        row = {name: 0 if value == PLACEHOLDER else value for name, value in row.items()}
    return row


def card(choice: ChosenAgent, config: RunConfig, example: ExampleCode, digest: str) -> str:
    """Return the README.md of an export; `digest` is the SHA-256 of the adapter's tensors."""
    # Imported here: it takes a second.
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(
        base_model=example.base.hub_id,  # None without an id on the Hub, which refuses other names
        library_name="transformers" if example.merged else "peft",
        tags=["grpo", *([] if example.merged else ["lora"]), "evo-grpo"],
    )
    text = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        choice=choice,
        example=example,
        digest=digest,
        replay=replay.read_replay(choice.run),
        run=choice.run.resolve().name,
        task=config.env.kind,
        score=_score,
        made=_made,
        number=_number,
        rivals_text=story.rivals_text,
        with_error=with_error,
        arm_label=arms.arm_label,
        count=count,
        literal=literal,
        plain=_plain,
        code=_code,
    )
    return str(text)


def _made(mutation: Mutation) -> str:
    changed = mutation.changes.items()
    changes = ", ".join(f"{_plain(name)} {_number(a)} → {_number(b)}" for name, (a, b) in changed)
    return _plain(mutation.op) + (f" ({changes})" if changes else "")


def _number(value: Value | tuple[float, ...]) -> str:
    """Format a value, or the two ends of a clip range, with three significant digits."""
    if isinstance(value, tuple):
        return ":".join(map(_number, value))
    return _plain(value) if isinstance(value, str) else f"{value:.3g}"


def _score(score: Score) -> str:
    """Return a mean reward with its standard error; "none" where it is not finite."""
    return "none" if math.isnan(score.mean) else with_error(score.mean, score.se, 4)


def _plain(text: str) -> str:
    """Escape a string from outside so that Markdown shows it literally."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def _code(text: str) -> str:
    """Return a string from outside as a code span, even if it contains backticks."""
    text = printable(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest or not text else ""
    return f"{fence}{space}{text}{space}{fence}"


FORMAT = 1
"""Version of export.json."""
TOKEN = "HF_TOKEN"
"""The environment variable with the token, which huggingface_hub reads too."""


def export(  # noqa: PLR0913 -- all but the first two have defaults
    run: str | Path,
    out: str | Path,
    *,
    agent: int | None = None,
    member: int | None = None,
    round: int | None = None,
    best_ever: bool = False,
    prefer: Mapping[str, float] | None = None,
    merge: bool = False,
    push: str | None = None,
    force: bool = False,
    anyway: bool = False,
) -> Path:
    """Write an agent of a run as a folder that loads without this package, with a model card.

    Without `agent`, `member`, `round`, `best_ever` and `prefer` the winner is written: the winner
    of the final comparison or, if the run is not finished, the best agent of the last round.

    Args:
        run: Run folder with at least one finished round.
        out: Folder to write; new or empty.
        agent: Number of an agent.
        member: Id of a member, which is one life of an agent.
        round: 0-based round after which the agent is taken, by default its last round; without
            `agent` and `member`, the best agent of that round.
        best_ever: Take the agent with the greatest fitness of all rounds, as of its best round.
        prefer: In a run with several objectives, take the agent of the Pareto front with the
            greatest weighted sum, for instance `{"tokens": 0.2}`. Each objective is normalised on
            the front: the best agent has 1, the worst 0. Weights are from 0 to 1, together at most
            1; objectives without a weight share the rest.
        merge: Write one merged model instead of an adapter.
        push: Repository on the Hugging Face Hub, `owner/name`; a new one is private. The token is
            read from HF_TOKEN.
        force: Replace an earlier export.
        anyway: Export the winner even if it is worse than the base model: the 95% interval of its
            gain on the test prompts lies below zero.

    Returns:
        The folder. `AutoPeftModelForCausalLM.from_pretrained(".")` loads it there, or
        `AutoModelForCausalLM` if it is a merged model.

    Raises:
        CheckpointError: No round is finished, no agent has a fitness, or its checkpoint was
            deleted or changed.
        ConfigError: There is no such agent, member, round or objective, `push` has no token, or the
            winner is worse than the base model and `anyway` is off.
        ModelError: The base cannot be loaded, or an adapter cannot be merged into it.
        RunDirError: `out` is not empty and `force` is off, or has a file that no export wrote.
        RunFailedError: `out` cannot be written; or the Hub cannot be reached after `out` was
            written.
    """
    choice = choose_of(run, agent, member, round, best_ever=best_ever, prefer=prefer)
    return export_choice(choice, Path(out), merge=merge, push=push, force=force, anyway=anyway)


def export_choice(
    choice: ChosenAgent,
    target: Path,
    *,
    merge: bool,
    push: str | None,
    force: bool,
    anyway: bool = False,
) -> Path:
    """Write the chosen agent; see `export`."""
    if choice.loss and not anyway:
        raise ConfigError(
            f"export: expected a winner that is not worse than the base model, got a loss of "
            f"{choice.loss}; use the base model, export another agent by its number, or this one "
            "with --anyway (anyway=True in Python)"
        )
    if push is not None:
        check_push(push)
    adapter = read_adapter_files(choice)
    with writing(target, "export"):
        folder = check_target(target, force=force)
    config = read_config(choice.run, past=True)
    base = find_base(choice, config.model, adapter[ADAPTER], config.engine.quantization)
    if push is not None and not merge and os.path.isabs(base.reference):
        raise ConfigError(
            f"push: expected a base that others have too, got {base.name!r}, a folder of this "
            "machine; push one model with --merge, or push the base and name it by its Hub id"
        )
    contents = (merged_contents if merge else adapter_contents)(choice, base, adapter)
    digest = choice.files[f"actor/{WEIGHTS}"]
    example = ExampleCode.of(base, contents, config, choice.agent.record.hparams, push)
    files = {CARD: card(choice, config, example, digest).encode(), **contents.files}
    with writing(target, "export"):
        check_target(target, force=force)  # again: loading the base takes time
        manifest = _about(choice, base, dtype=contents.dtype)
        names = write_export(folder, files, contents.fills, manifest)
    for note in contents.notes:
        warnings.warn(note, UserWarning, stacklevel=3)
    if push is not None:
        push_files(push, folder, names)
    return target


def _about(choice: ChosenAgent, base: BaseModel, *, dtype: str | None) -> dict[str, Any]:
    """Return the content of export.json except the files; rounds count from 0 in it."""
    values = choice.agent.record.hparams.to_dict()
    return {
        "format": FORMAT,
        "run": choice.run.resolve().name,
        "kind": choice.agent.kind,
        "agent": choice.agent.agent,
        "member": choice.agent.member,
        "round": choice.agent.record.round,
        "adapter_sha256": choice.files[f"actor/{WEIGHTS}"],
        "base": base.shown,
        "base_digest": base.digest,
        "merged": dtype,
        **{name: values[name] for name in OF_ANSWERS if name in values},
    }


def check_push(repository: str) -> None:
    """Check the name of a repository and the token, before anything is written."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    fault = "" if repository.count("/") == 1 else "it has no owner"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        fault = shorten(str(error))
    if fault or not _token():
        raise ConfigError(
            f"push: expected a repository of the Hub as owner/name, got "
            f"{shorten(repository)!r}: {fault}"
            if fault
            else "push: expected a token of the Hub with write access in the environment, as "
            f"{TOKEN}, got none; make one on huggingface.co/settings/tokens"
        )


def push_files(repository: str, folder: Path, names: Sequence[str]) -> None:
    """Push the files of an export in one commit, which removes the files of an earlier export."""
    # huggingface_hub takes a second to import, and few exports are pushed.
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors

    # The base class of the errors of its HTTP client.
    http: type[Exception] = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage] -- huggingface_hub documents it
    api = HfApi(token=_token())
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        remote_names = api.list_repo_files(repository)
        stale = [name for name in remote_names if name not in names and is_export_file(name)]
        operations: list[Any] = [CommitOperationDelete(name) for name in stale]
        operations += [CommitOperationAdd(name, str(folder / name)) for name in names]
        api.create_commit(repository, operations, commit_message="Export from evo-grpo")
    except (http, OSError, RuntimeError, ValueError) as error:
        raise RunFailedError(
            f"push: {repository}: {_why(error)}; the export in {folder} is complete: "
            f"push it again with --force, or with: hf upload {repository} {folder}"
        ) from error


def _token() -> str:
    return os.environ.get(TOKEN, "").strip()


def _why(error: Exception) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    text = shorten(redacted(f"{type(error).__name__}: {error}", _token()))
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code in (401, 403):
            return f"the Hub refuses the token in {TOKEN}, which needs write access there ({text})"
        return f"the Hub refused ({text})"
    return f"the Hub cannot be reached; check the network ({text})"
