"""Pushes an export to the Hugging Face Hub, in one commit with its files and no others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_grpo.after.export.writing import is_export_file
from evo_grpo.errors import ConfigError, RunFailedError
from evo_grpo.printable import redacted, shorten

TOKEN = "HF_TOKEN"
"""The environment variable with the token, which huggingface_hub reads too."""


@dataclass(frozen=True)
class Push:
    """A repository on the Hub, with a `huggingface_hub.HfApi` that has a token."""

    repository: str
    api: Any

    @classmethod
    def prepare(cls, repository: str) -> Push:
        """Check the repository name, the token and what the Hub says of it, before writing.

        A network that fails now may work once the export is written.
        """
        # Imported here: it takes a second, and few exports are pushed.
        from huggingface_hub import HfApi, constants
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
        if constants.HF_HUB_OFFLINE:
            raise ConfigError("push: HF_HUB_OFFLINE is set, so that nothing is sent; unset it")
        api = HfApi(token=token)
        if wrong := _wrong_token(api):
            raise ConfigError(
                f"push: expected a token of the Hub with write access in {TOKEN}, got one that "
                f"{wrong}; make one on huggingface.co/settings/tokens"
            )
        return cls(repository, api)

    def push(self, folder: Path, names: Sequence[str]) -> None:
        """Push the files of an export in one commit.

        Files of an earlier export that this one does not have are removed from the repository.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, errors

        # The base class of the errors of its HTTP client.
        http: type[Exception] = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage] -- documented there
        try:
            self.api.create_repo(self.repository, private=True, exist_ok=True)
            there = self.api.list_repo_files(self.repository)
            stale = [name for name in there if name not in names and is_export_file(name)]
            operations: list[Any] = [CommitOperationDelete(name) for name in stale]
            operations += [CommitOperationAdd(name, str(folder / name)) for name in names]
            self.api.create_commit(
                self.repository, operations, commit_message="Export from evo-grpo"
            )
        except (http, OSError, RuntimeError, ValueError) as error:
            raise RunFailedError(
                f"push: {self.repository}: {_why(error)}; the export in {folder} is complete: "
                f"push it again with --force, or with: hf upload {self.repository} {folder}"
            ) from error


def _why(error: Exception) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    said = shorten(redacted(f"{type(error).__name__}: {error}", os.environ.get(TOKEN, "").strip()))
    if isinstance(error, HfHubHTTPError):
        if _status(error) in (401, 403):
            return f"the Hub refuses the token in {TOKEN}, which needs write access there ({said})"
        return f"the Hub refused ({said})"
    return f"the Hub cannot be reached; check the network ({said})"


def _wrong_token(api: Any) -> str:  # noqa: ANN401 -- of a package that is loaded late
    """Return what is wrong with a token; empty where nothing is, or the Hub does not say it."""
    from huggingface_hub import errors

    http: type[Exception] = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage] -- documented there
    try:
        role = api.whoami()["auth"]["accessToken"]["role"]
    except (http, OSError, KeyError, TypeError) as error:
        return "the Hub does not know" if _status(error) == 401 else ""
    return "may only read" if role == "read" else ""


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
