"""Export of an agent as a folder that transformers, PEFT and vLLM load, with a model card.

choice    record/choice.py: the agent, as it was after a round
contents  contents.py: its adapter, its tokenizer, and a base that is found nowhere else; or a model
card      card.py, card.md.jinja: the agent, its scores and schedule, and code that runs as printed
writing   writing.py: writes a folder completely, or nothing that loads
pushing   here: in one commit with the files of the export, and no others
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evo_grpo.after.export.card import Use, card
from evo_grpo.after.export.contents import (
    BaseModel,
    adapter_contents,
    find_base,
    merged_contents,
    read_adapter_files,
)
from evo_grpo.after.export.writing import (
    ADAPTER,
    CARD,
    OF_ANSWERS,
    WEIGHTS,
    check_target,
    is_export_file,
    write_export,
)
from evo_grpo.errors import ConfigError, RunFailedError
from evo_grpo.printable import redacted, shorten
from evo_grpo.record.choice import ChosenAgent, choose_of
from evo_grpo.record.config import read_config
from evo_grpo.record.files import writing

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

    Without `agent`, `member`, `round`, `best_ever` and `prefer` it is the winner: of a finished run
    that of its final comparison, before the end the best agent of the last round.

    Args:
        run: Run folder with at least one finished round.
        out: Folder to write; new or empty.
        agent: An agent, by its number.
        member: One life of an agent, by its id.
        round: As it was after that round (0-based, as in all records), by default the last one;
            alone, the best agent of that round.
        best_ever: The agent with the greatest fitness of all rounds, as it was then.
        prefer: In a run with several objectives, the agent of the front with the greatest weighted
            sum, for instance `{"tokens": 0.2}`. Each objective is normalised: its best agent on the
            front has 1, its worst 0. Weights are from 0 to 1, together at most 1; objectives
            without one share the rest.
        merge: Write one merged model instead of an adapter.
        push: A repository on the Hugging Face Hub, `owner/name`, to push it to; a new one is
            private. The token is read from HF_TOKEN.
        force: Replace an earlier export.
        anyway: Export a winner that is worse than the base model too: the 95% interval of its gain
            on the test prompts lies below zero.

    Returns:
        The folder. `AutoPeftModelForCausalLM.from_pretrained(".")` loads it there, of a merged
        model `AutoModelForCausalLM`.

    Raises:
        CheckpointError: No round is finished, no agent has a fitness, its checkpoint was
            deleted or changed, or another file of the run is damaged.
        ConfigError: There is no such agent, member, round or objective, `push` has no token, or the
            winner is worse than the base model and `anyway` is off.
        ModelError: The base cannot be loaded, or an adapter cannot be merged into it.
        EngineUnavailable: The base is in a package that is not installed.
        RunDirError: `out` is not empty and `force` is off, it has a file that no export wrote,
            another version of this library wrote the run, or a file to export is behind a link.
        RunFailedError: `out` cannot be written, or the Hub cannot be reached; in that case the
            folder exists.
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
        place = check_target(target, force=force)
    config = read_config(choice.run, past=True)
    base = find_base(choice, config.model, adapter[ADAPTER], config.engine.quantization)
    if push is not None and not merge and os.path.isabs(base.reference):
        raise ConfigError(
            f"push: expected a base that others have too, got {base.name!r}, a folder of this "
            "machine; push one model with --merge, or push the base and name it by its Hub id"
        )
    contents = (merged_contents if merge else adapter_contents)(choice, base, adapter)
    digest = choice.files[f"actor/{WEIGHTS}"]
    use = Use.of(base, contents, config, push, choice.agent.record.hparams)
    files = {CARD: card(choice, config, use, digest).encode(), **contents.files}
    with writing(target, "export"):
        check_target(target, force=force)  # the base took its time to load
        about = _about(choice, base, dtype=contents.dtype)
        names = write_export(place, files, contents.fills, about)
    for note in contents.notes:
        warnings.warn(note, UserWarning, stacklevel=3)
    if push is not None:
        push_files(push, place, names)
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

    try:
        validate_repo_id(repository)
        if repository.count("/") != 1:
            raise HFValidationError(f"expected owner/name, got {repository!r}")
    except HFValidationError as error:
        raise ConfigError(
            f"push: expected a repository of the Hub as owner/name, got "
            f"{shorten(repository)!r}: {shorten(str(error))}"
        ) from error
    if not _token():
        raise ConfigError(
            f"push: expected a token of the Hub with write access in the environment, as "
            f"{TOKEN}, got none; make one on huggingface.co/settings/tokens"
        )


def push_files(repository: str, folder: Path, names: Sequence[str]) -> None:
    """Push the files of an export in one commit.

    Files of an earlier export that this one does not have are removed from the repository.
    """
    # Imported here: it takes a second, and few exports are pushed.
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors

    # The base class of the errors of its HTTP client.
    http: type[Exception] = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage] -- documented there
    api = HfApi(token=_token())
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        there = api.list_repo_files(repository)
        stale = [name for name in there if name not in names and is_export_file(name)]
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

    said = shorten(redacted(f"{type(error).__name__}: {error}", _token()))
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code in (401, 403):
            return f"the Hub refuses the token in {TOKEN}, which needs write access there ({said})"
        return f"the Hub refused ({said})"
    return f"the Hub cannot be reached; check the network ({said})"
