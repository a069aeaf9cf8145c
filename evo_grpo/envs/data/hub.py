"""Rows of a dataset of the Hugging Face Hub, by the package `datasets`.

The package finds the files of a dataset, downloads them once into its cache, and turns them into
rows. It runs no code of the dataset. Before it is called, one request with a time limit finds the
commit of the revision, because the package waits for minutes for a Hub that does not answer.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.data.bounded import MAX_GIGABYTES
from evo_grpo.envs.messages import listed, nearest
from evo_grpo.errors import DataError, EngineUnavailable
from evo_grpo.places import find
from evo_grpo.settings.hub import HubDataset
from evo_grpo.sources import hub_words

if TYPE_CHECKING:
    from evo_grpo.settings import EnvConfig

TIMEOUT = 10.0
"""Seconds that the Hub may take to answer."""
_ID = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPLITS = ("train", "validation", "test")

_ROWS: dict[str, list[dict[str, Any]]] = {}
"""Rows of datasets at a commit, which never change."""


def hub_dataset(source: object) -> HubDataset | None:
    """Return the dataset of the Hub that a source names, None if it names a file or is no name.

    A name such as owner/name is one of the Hub unless it is a path that exists, or ends like a file
    (owner/name.csv).
    """
    if isinstance(source, HubDataset):
        return source
    if not isinstance(source, str) or not _ID.fullmatch(source):
        return None
    if (
        re.fullmatch(r"\.[A-Za-z]\w*", Path(source).suffix)
        or source[0] == "."
        or find(source).exists()
    ):
        return None
    return HubDataset(path=source)


def read_hub(
    dataset: HubDataset, name: str, gigabytes: float = MAX_GIGABYTES
) -> list[dict[str, Any]]:
    """Read a split of a dataset.

    Args:
        dataset: The dataset; its split is that of `name` where it has none.
        name: Name in messages, such as "train" or "env.train".
        gigabytes: The most memory that its rows may take, in units of 10^9 bytes.

    Raises:
        DataError: There is no such dataset, revision, configuration, split or column; it is gated
            or too large; or the Hub does not answer and the cache does not have it.
        EngineUnavailable: The package is not installed.
    """
    wanted = _with_split(dataset, name)
    key = wanted.model_dump_json()
    if key in _ROWS:
        return _ROWS[key]
    where = f"{name}: the dataset {dataset.path!r}"
    rows = _rows(wanted, _commit(wanted, where), where, gigabytes)
    if _is_pinned(wanted):
        _ROWS[key] = rows
    return rows


def pinned(env: EnvConfig) -> dict[str, HubDataset]:
    """Return the datasets of the Hub in `env`, by the setting, with the commits they have now.

    Raises:
        DataError: See `read_hub`.
    """
    found: dict[str, HubDataset] = {}
    for name in _SPLITS:
        dataset = hub_dataset(getattr(env, name))
        if dataset is not None:
            wanted = _with_split(dataset, name)
            where = f"env.{name}: the dataset {dataset.path!r}"
            found[name] = wanted.replace(revision=_commit(wanted, where))
    return found


def _with_split(dataset: HubDataset, name: str) -> HubDataset:
    own = name.rpartition(".")[2]
    split = dataset.split or (own if own in _SPLITS else "train")
    return dataset.replace(split=split)


def _is_pinned(dataset: HubDataset) -> bool:
    return dataset.revision is not None and _COMMIT.fullmatch(dataset.revision) is not None


def _commit(dataset: HubDataset, where: str) -> str | None:
    """Return the commit of a revision; without network (HF_HUB_OFFLINE), the revision itself."""
    packages(where)
    # Imported here: an extra, and slow to load for runs that read files.
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        return dataset.revision
    page = f"{constants.ENDPOINT}/datasets/{dataset.path}"
    try:
        info = HfApi().dataset_info(dataset.path, revision=dataset.revision, timeout=TIMEOUT)
    except GatedRepoError:
        raise DataError(
            f"{where} is gated: expected access to it; ask for it at {page}, and log in with "
            "hf auth login, or give a token in HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise DataError(
            f"{where}: expected one that is on the Hub, got no such name; correct it, give the "
            "path of a file, or, if it is private, log in with hf auth login"
        ) from None
    except RevisionNotFoundError:
        raise DataError(
            f"{where}: expected a branch, tag or commit of it as revision, got "
            f"{dataset.revision!r}; see {page}"
        ) from None
    except HFValidationError as error:
        raise DataError(f"{where}: expected a name such as owner/name: {error}") from None
    except (HfHubHTTPError, OSError, *_transport_errors()) as error:
        why = hub_words(str(error)) or type(error).__name__
        raise DataError(
            f"{where}: expected an answer of {constants.ENDPOINT} within {TIMEOUT:g} s, got none "
            f"({why}); try again, or use the copy in the cache, if there is one, with "
            "HF_HUB_OFFLINE=1"
        ) from None
    return info.sha


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return the base class of errors of a connection, in the HTTP package of huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    bases = [base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"]
    return tuple(base for base in bases if issubclass(base, Exception))


def packages(where: str) -> Any:  # noqa: ANN401 -- a module
    """Return the package `datasets`.

    Raises:
        EngineUnavailable: It is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise EngineUnavailable(
            f'{where}: reading it needs the package datasets: pip install "evo-grpo[data]"'
        ) from error
    return datasets


def _rows(
    dataset: HubDataset, commit: str | None, where: str, gigabytes: float
) -> list[dict[str, Any]]:
    datasets = packages(where)
    from pyarrow import ArrowException

    split = str(dataset.split)
    failures = (
        datasets.exceptions.DatasetsError,
        ArrowException,
        ValueError,
        OSError,
        RuntimeError,
    )
    with _silent(datasets):
        try:
            builder = datasets.load_dataset_builder(
                dataset.path, name=dataset.name, revision=commit
            )
            builder.download_and_prepare()
        except failures as error:
            raise DataError(
                f"{where} cannot be read: {hub_words(' '.join(str(error).split()), 400)}"
            ) from None
        known: Mapping[str, Any] = builder.info.splits or {}
        base = re.split(r"[\[+]", split)[0].strip()
        if base not in known:
            raise DataError(
                f"{where}: expected one of its splits as split, {listed(known)}, got {base!r}."
                f"{nearest(base, known)}"
            )
        try:
            data = builder.as_dataset(split=split)
        except failures as error:
            raise DataError(f"{where}: split {split!r}: {hub_words(str(error))}") from None
        columns = dataset.columns or {name: name for name in data.column_names}
        for theirs in columns.values():
            if theirs not in data.column_names:
                raise DataError(
                    f"{where}: expected one of its columns in columns, "
                    f"{listed(data.column_names)}, got {theirs!r}."
                    f"{nearest(theirs, data.column_names)}"
                )
        read = data.select_columns(list(dict.fromkeys(columns.values())))
        if read.data.nbytes > gigabytes * 1e9:
            raise DataError(
                f"{where}, split {split!r}: expected rows of at most {gigabytes:g} GB, got "
                f"{read.data.nbytes / 1e9:.1f}; read a part, such as {base}[:10000], or raise "
                "env.max_data_gb"
            )
        return [{ours: row[theirs] for ours, theirs in columns.items()} for row in read]


@contextmanager
def _silent(datasets: Any) -> Generator[None]:  # noqa: ANN401 -- a module
    """Switch the progress bars of the package off."""
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not shown:
            datasets.enable_progress_bars()
