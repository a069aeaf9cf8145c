"""Reads rows of a dataset of the Hugging Face Hub with the package `datasets`.

No code of the dataset is run. First, one request with a time limit finds the commit of the
revision, because `datasets` waits for minutes for a Hub that does not answer.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evo_grpo.errors import DataError, EngineUnavailable
from evo_grpo.places import find
from evo_grpo.settings import EnvConfig
from evo_grpo.settings.objects import HubDataset
from evo_grpo.sources import hub_message

TIMEOUT = 10.0
"""Seconds that the Hub may take to answer."""
_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MEDIA = re.compile(r"\b(Image|Audio|Video)\(")
_NAMES = re.compile(r"'[^']*'|\"[^\"]*\"")  # of columns and classes
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPLITS = ("train", "validation", "test")

_ROWS: dict[str, list[dict[str, Any]]] = {}
"""Rows that were read from datasets pinned to a commit, by the dataset's settings as JSON."""


def hub_dataset(source: object) -> HubDataset | None:
    """Return the dataset of the Hub that `source` names; None if it names none, as a path does."""
    if isinstance(source, HubDataset):
        return source
    if not isinstance(source, str) or not _ID.fullmatch(source):
        return None
    ends_as_file = re.fullmatch(r"\.[A-Za-z]\w*", Path(source).suffix)
    if ends_as_file or source[0] == "." or find(source).exists():
        return None
    return HubDataset(path=source)


def read_hub(dataset: HubDataset, name: str, gigabytes: float) -> list[dict[str, Any]]:
    """Read the rows of the split in `dataset`, or else of that in `name`, such as "env.train"."""
    dataset_split = _with_split(dataset, name)
    key = dataset_split.model_dump_json()
    if key in _ROWS:
        return _ROWS[key]
    where = f"{name}: the dataset {dataset.path!r}"
    rows = _rows(dataset_split, _commit(dataset_split, where), where, gigabytes)
    if _COMMIT.fullmatch(dataset_split.revision or ""):
        _ROWS[key] = rows
    return rows


def pinned(env: EnvConfig) -> dict[str, HubDataset]:
    """Return setting -> dataset, with its current commit, for each dataset of the Hub in `env`."""
    sources = {name: hub_dataset(getattr(env, name)) for name in _SPLITS}
    return {
        name: _with_split(dataset, name).replace(
            revision=_commit(dataset, f"env.{name}: the dataset {dataset.path!r}")
        )
        for name, dataset in sources.items()
        if dataset is not None
    }


def _with_split(dataset: HubDataset, name: str) -> HubDataset:
    setting = name.rpartition(".")[2]
    return dataset.replace(split=dataset.split or (setting if setting in _SPLITS else "train"))


def _commit(dataset: HubDataset, where: str) -> str | None:
    """Return the commit of a dataset's revision, or the revision itself with HF_HUB_OFFLINE."""
    # Imported here: slow to load for runs that read files.
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        return dataset.revision
    page = f"{constants.ENDPOINT}/datasets/{dataset.path}"
    try:
        return HfApi().dataset_info(dataset.path, revision=dataset.revision, timeout=TIMEOUT).sha
    except errors.RevisionNotFoundError:
        why = (
            f"expected a branch, tag or commit of it as revision, got {dataset.revision!r}; see "
            f"{page}"
        )
    except (
        errors.RepositoryNotFoundError,
        errors.HFValidationError,
    ) as error:  # the first if it is gated too
        why = (
            f"expected one of the Hub that you may read, got {type(error).__name__}; correct the "
            f"name owner/name, give the path of a file, or ask for access at {page} and log in "
            "with hf auth login, or give a token in HF_TOKEN"
        )
    except Exception as error:  # huggingface_hub has changed its HTTP library
        why = (
            f"expected an answer of {constants.ENDPOINT} within {TIMEOUT:g} s, got none "
            f"({hub_message(str(error)) or type(error).__name__}); try again, or use the copy in "
            "the cache, if there is one, with HF_HUB_OFFLINE=1"
        )
    raise DataError(f"{where}: {why}")


def _rows(
    dataset: HubDataset, commit: str | None, where: str, gigabytes: float
) -> list[dict[str, Any]]:
    try:
        import datasets
        from datasets.exceptions import DatasetsError
        from pyarrow import ArrowException
    except ImportError as error:
        raise EngineUnavailable(
            f'{where}: reading it needs the package datasets: pip install "evo-grpo[data]"'
        ) from error
    where = f"{where}, split {dataset.split!r}"
    failures = DatasetsError, ArrowException, ValueError, OSError, RuntimeError
    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        data: Any = datasets.load_dataset(
            dataset.path, dataset.name, split=dataset.split, revision=commit
        )
        columns = dataset.columns or {name: name for name in data.column_names}
        selected = data.select_columns(list(dict.fromkeys(columns.values())))
    except failures as error:
        raise DataError(
            f"{where}: expected a name, split and columns that can be read: "
            f"{hub_message(' '.join(str(error).split()), 400)}"
        ) from None
    finally:
        if not silent:
            datasets.enable_progress_bars()
    if selected.data.nbytes > gigabytes * 1e9:
        raise DataError(
            f"{where}: expected rows of at most {gigabytes:g} GB, got "
            f"{selected.data.nbytes / 1e9:.1f}; read a part, such as train[:10000], or raise "
            "env.max_data_gb"
        )
    check_text_only(selected, where)
    return [{ours: row[theirs] for ours, theirs in columns.items()} for row in selected]


def check_text_only(dataset: object, name: str) -> None:
    """Refuse a datasets.Dataset with a column of images or other media, before decoding any."""
    features: Mapping[str, object] = getattr(dataset, "features", None) or {}
    for column, feature in features.items():
        if media := _MEDIA.search(_NAMES.sub("", repr(feature))):  # also in lists and mappings
            raise DataError(
                f'{name}: expected columns of text and numbers, got "{column}" of the type '
                f"{media[1]}, and the models here read text; leave it out by .remove_columns, or "
                "by the key columns of a dataset of the Hub"
            )
