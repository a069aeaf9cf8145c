"""Pushes an export to the Hugging Face Hub, in one commit with its files and no others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_grpo.after.export.card import front_matter
from evo_grpo.after.export.writing import CARD, is_export_file
from evo_grpo.errors import ConfigError, RunFailedError
from evo_grpo.printable import shorten

TOKEN = "HF_TOKEN"
"""The environment variable with the token, which huggingface_hub reads too."""


@dataclass(frozen=True)
class Push:
    """A repository on the Hub, with a `huggingface_hub.HfApi` that has a token."""

    repository: str
    api: Any

    @classmethod
    def prepare(cls, repository: str) -> Push:
        """Check the repository name and the token, before anything is written."""
        # Imported here: it takes a second, and few exports are pushed.
        from huggingface_hub import HfApi
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
        token = os.environ.get(TOKEN, "").strip()
        if not token:
            raise ConfigError(
                f"push: expected a token of the Hub with write access in the environment, as "
                f"{TOKEN}, got none; make one on huggingface.co/settings/tokens"
            )
        return cls(repository, HfApi(token=token))

    def push(self, folder: Path, names: Sequence[str], *, base: str | None, merged: bool) -> None:
        """Push the files of an export in one commit.

        Files of an earlier export that this one does not have are removed from the repository.
        `base` is the Hub id of the base, None if it has none: the Hub refuses other names.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, errors

        card = (folder / CARD).read_text(encoding="utf-8")
        body = card.partition("\n---\n")[2]
        for_hub = f"---\n{front_matter(base, merged=merged)}---\n{body}".encode()
        # The base class of the errors of its HTTP client.
        http: type[Exception] = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage] -- documented there
        try:
            self.api.create_repo(self.repository, private=True, exist_ok=True)
            there = self.api.list_repo_files(self.repository)
            stale = [name for name in there if name not in names and is_export_file(name)]
            operations: list[Any] = [CommitOperationDelete(name) for name in stale]
            operations += [
                CommitOperationAdd(name, for_hub if name == CARD else str(folder / name))
                for name in names
            ]
            self.api.create_commit(
                self.repository, operations, commit_message="Export from evo-grpo"
            )
        except (http, OSError, RuntimeError, ValueError) as error:
            raise RunFailedError(
                f"push: {self.repository}: {_why(error)}; the export in {folder} is complete: "
                f"push it again with --force, or with: hf upload {self.repository} {folder}"
            ) from error


def _why(error: Exception) -> str:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    said = shorten(f"{type(error).__name__}: {error}")
    if isinstance(error, OfflineModeIsEnabled):
        return f"no request was sent, because HF_HUB_OFFLINE is set; unset it ({said})"
    if isinstance(error, HfHubHTTPError):
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            return f"the Hub refuses the token in {TOKEN}, which needs write access there ({said})"
        return f"the Hub refused ({said})"
    return f"the Hub cannot be reached; check the network ({said})"
