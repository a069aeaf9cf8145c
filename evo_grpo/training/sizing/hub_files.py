"""Fetches the small files of a hub model: its config.json and what a chat template needs."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from evo_grpo.errors import ModelError
from evo_grpo.model.files import config_file
from evo_grpo.sources import hub_message, resolve

#: Files that tell the size of a model and whether its tokenizer has a chat template.
CONFIG = "config.json"
OTHERS = ("tokenizer_config.json", "chat_template.jinja")
#: Files of which a model with weights has one.
WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
#: Seconds in which the hub has to answer the first request.
SECONDS = 4.0


def fetch_small_files(name: str) -> str | None:
    """Fetch a model's small files into the hub's cache; return why the hub did not answer, or None.

    Cached files are fetched again if the hub has newer ones. Nothing is fetched if `name` is no hub
    id, or if HF_HUB_OFFLINE is set. Raises ModelError if the hub refuses the model.
    """
    source = resolve(name)
    if source.local:
        return None
    try:
        _download(source.path)
    except Exception as error:  # the client's HTTP library, and its errors, differ between versions
        return _reason(name, error)
    return None


def check_available(name: str) -> None:
    """Refuse a hub model that cannot be downloaded, before a run is set up.

    A model whose weights are in the hub's cache needs no request.
    """
    source = resolve(name)
    if source.local or any(config_file(source, file) for file in WEIGHTS):
        return
    why = fetch_small_files(name)
    if why is not None:
        raise ModelError(
            f"model {name!r}: {why}, and its weights are not in the cache; a hub id needs the "
            "network or a warm cache: connect, or name a folder with the model"
        )


def _download(repository: str) -> None:
    # Imported here: only a hub id needs it; it is a dependency of transformers.
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import RemoteEntryNotFoundError
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        """A progress bar that is not shown, because the files are small."""

        def __init__(self, *given: Any, **keywords: Any) -> None:
            super().__init__(*given, **{**keywords, "disable": True})

    endpoint = os.environ.get("HF_ENDPOINT")
    # A download repeats a failed request for almost a minute; this shows a missing network at once.
    get_hf_file_metadata(hf_hub_url(repository, CONFIG, endpoint=endpoint), timeout=SECONDS)
    get = partial(hf_hub_download, repository, endpoint=endpoint, tqdm_class=Silent)
    get(CONFIG)
    for file in OTHERS:
        try:
            get(file)
        except RemoteEntryNotFoundError:
            continue  # the cache records that the model has no such file


def _endpoint() -> str:
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT") or constants.ENDPOINT


def _reason(name: str, error: Exception) -> str:
    """Return why the hub could not be asked; raise ModelError if it refused the model."""
    from huggingface_hub.errors import (
        DisabledRepoError,
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and its config.json is not in the cache"
    hub, login = _endpoint(), "log in with: hf auth login"
    for kinds, text in (
        (GatedRepoError | DisabledRepoError, f"accept its terms on {hub}/{name}, then {login}"),
        (RepositoryNotFoundError, f"{hub} has no such id, or a private one; correct it or {login}"),
        (HFValidationError, f"expected a hub id owner/name: {error}"),
        (RemoteEntryNotFoundError, "expected a config.json on the hub, found none; name its base"),
    ):
        if isinstance(error, kinds):
            raise ModelError(f"model {name!r}: {text}") from None
    first_line = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
    return f"{hub} cannot be reached: {hub_message(first_line, 200)}"
