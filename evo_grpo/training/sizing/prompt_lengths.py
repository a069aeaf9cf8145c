"""Reads a model's chat template, and the lengths of a task's prompts, without transformers."""

import os
import signal
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast, final

from evo_grpo.envs.data.tables import SPLITS, DatasetRow, LazyRows, Split, place_of
from evo_grpo.envs.prompts import RenderedPrompts, fitting_rows
from evo_grpo.envs.task import Task
from evo_grpo.envs.template_keywords import dropped_sentence, rendered_chat
from evo_grpo.errors import ModelError
from evo_grpo.escaping import shorten
from evo_grpo.model.files import config_file, gguf_header, read_object
from evo_grpo.sources import resolve

MOST_READ = 10_000
"""Most rows whose prompts are read; of more rows, a sample is read."""
MOST_ADDED = 1_000_000
"""Most characters that a chat template may add to the messages."""
MOST_MEMORY = 100 * 2**20
"""Bytes that a chat template may take while it is rendered."""
MOST_SECONDS = 5
"""Seconds that a chat template may take for one prompt."""
_NO_LIMIT = 2**62
_CONFIG = "tokenizer_config.json"
#: This file takes precedence over the key in `_CONFIG`.
_TEMPLATE = "chat_template.jinja"
#: Folder of further templates.
_TEMPLATES = "additional_chat_templates"


class PromptLengths(NamedTuple):
    """Lengths of the prompts of all splits, in tokens.

    Attributes:
        least: Tokens of the shortest prompt.
        most: Tokens of the longest prompt.
        read: Number of rows that were read.
        rows: Number of rows in all.
        different: Number of different prompts of each split, for the template that makes the
            fewest; empty if not all rows were read.
        too_long: Number of rows of each split that were read and whose prompt leaves no room for a
            completion; see `env.too_long`.
    """

    least: int
    most: int
    read: int
    rows: int
    different: Mapping[str, int]
    too_long: Mapping[str, int]


class FirstPrompt(NamedTuple):
    """The prompt of the first train row with its special tokens, and its length in tokens."""

    text: str
    tokens: int


def read_prompts(
    task: Task,
    model: str,
    context: int | None,
    vocabulary: int | None,
    answer: int | None = None,
) -> tuple[PromptLengths | None, FirstPrompt | None, list[str]]:
    """Return the lengths of a task's prompts, its first prompt, and warnings about the template.

    Lengths and prompt are None for a task that generates its rows, which would take long. All
    lengths are 0 without a tokenizer.json. `context` is the most tokens of a prompt with its
    completion, `vocabulary` the number of embeddings; either is None if unknown. `answer` is the
    number of tokens that `env.too_long: truncate_left` leaves for a completion.

    Raises:
        PromptTooLongError: A prompt leaves no room for a completion; the message names its row.
        ModelError: The tokenizer is damaged, or has tokens that the model does not have.
        ConfigError: The chat template refuses the messages.
    """
    tokenizer: Any = FileTokenizer(model)
    templates = list(task.templates.values())
    total = sum(map(len, task.splits.values()))
    splits: Mapping[Split, Sequence[DatasetRow]] = {
        split: _sample(task.splits[split], total) for split in SPLITS
    }
    dropped = [dropped_sentence(t, splits["train"], tokenizer) for t in templates]
    warnings = list(dict.fromkeys(text for sentences in dropped for text in sentences))
    if isinstance(task.splits["train"], LazyRows):
        return None, None, warnings
    if tokenizer.backend is None:
        return PromptLengths(0, 0, 0, total, {}, {}), None, warnings
    read_rows = sum(map(len, splits.values()))
    by_template = [RenderedPrompts(splits, t, tokenizer) for t in templates]
    splits, left_out = _fitting(task, by_template, splits, context, whole=read_rows == total)
    first_prompt: FirstPrompt | None = None
    lengths: list[int] = []
    texts: dict[str, list[set[str]]] = {split: [] for split in SPLITS}
    for template in templates:
        cut = answer if task.too_long == "truncate_left" else None
        rendered = RenderedPrompts(splits, template, tokenizer, cut)
        rendered.limit(context or _NO_LIMIT)
        if first_prompt is None and splits["train"]:
            ids = list(rendered.get("train", 0).token_ids)
            first_prompt = FirstPrompt(tokenizer.decode(ids), len(ids))
        for split in SPLITS:
            texts[split].append(set())
            for number, length in enumerate(rendered.lengths(split)):
                prompt = rendered.get(split, number)
                lengths.append(length)
                texts[split][-1].add(prompt.text)
                if vocabulary is not None and max(prompt.token_ids) >= vocabulary:
                    raise ModelError(
                        f"{place_of(prompt.columns, f'{split}, row {number}')}: the prompt has "
                        f"the token {max(prompt.token_ids)}, and model {model!r} has "
                        f"embeddings of {vocabulary} tokens: its tokenizer has more; resize the "
                        "embeddings, or take the tokenizer of the model"
                    )
    count = {split: min(map(len, prompts), default=0) for split, prompts in texts.items()}
    different = count if lengths and read_rows == total else {}
    least, most = min(lengths, default=0), max(lengths, default=0)
    return PromptLengths(least, most, read_rows, total, different, left_out), first_prompt, warnings


def _fitting(
    task: Task,
    every: Sequence[RenderedPrompts],
    splits: Mapping[Split, Sequence[DatasetRow]],
    context: int | None,
    *,
    whole: bool,
) -> tuple[Mapping[Split, Sequence[DatasetRow]], dict[str, int]]:
    """Return, for each split, the rows that a run uses and the number of rows that are too long."""
    if context is None or task.too_long == "error":
        return splits, {}
    whole = whole and task.too_long == "drop"
    fitting = fitting_rows(every, splits, context - 1, whole=whole)
    too_long = {str(split): len(rows) - len(fitting[split]) for split, rows in splits.items()}
    return splits if task.too_long == "truncate_left" else fitting, too_long


def _sample(rows: Sequence[DatasetRow], total: int) -> Sequence[DatasetRow]:
    if total <= MOST_READ:
        return rows
    count = max(1, len(rows) * MOST_READ // total)
    return [rows[number * len(rows) // count] for number in range(count)]


@final
class FileTokenizer:
    """A tokenizer read from a model's files, with transformers' methods for rendering prompts.

    Attributes:
        backend: The tokenizer of the package tokenizers, None if there is no tokenizer.json.
    """

    def __init__(self, model: str) -> None:
        file, config = (_file(model, name) for name in ("tokenizer.json", _CONFIG))
        self.backend: Any = None if file is None else _backend(model, file)
        template = chat_template_of(model) or ""
        named = template if isinstance(template, dict) else {"default": template}
        self.chat_template = named.get(Path(_TEMPLATE).stem) or named.get("default")
        self._special: dict[str, str] = {}
        for name, value in ({} if config is None else read_object(model, config)).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                self._special[name] = text
        end = self._special.get("eos_token")
        self.eos_token_id = self.backend and end and self.backend.token_to_id(end)

    def __call__(
        self, texts: str | list[str], *, add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, Any]:
        """Return {"input_ids": ...}: the token ids of a text, or a list of them for each text."""
        del verbose
        batch = [texts] if isinstance(texts, str) else texts
        encoded = self.backend.encode_batch_fast(batch, add_special_tokens=add_special_tokens)
        ids = [encoding.ids for encoding in encoded]
        return {"input_ids": ids[0] if isinstance(texts, str) else ids}

    def encode(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> list[int]:
        """Return the token ids of a text."""
        return self(text, add_special_tokens=add_special_tokens, verbose=verbose)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, with special tokens."""
        return self.backend.decode(ids, skip_special_tokens=False)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool, **keywords: Any
    ) -> str:
        """Render messages as text; ValueError if the template exceeds a limit (`MOST_...`)."""
        del tokenize
        try:
            with _bounded_memory(), _bounded_time():
                text = rendered_chat(
                    str(self.chat_template), messages, {**self._special, **keywords}
                )
        except MemoryError as error:
            raise ValueError(f"it needs more than {MOST_MEMORY:,} bytes of memory") from error
        if (added := len(text) - sum(len(m["content"]) for m in messages)) > MOST_ADDED:
            raise ValueError(f"it adds {added:,} characters; expected at most {MOST_ADDED:,}")
        return text


@contextmanager
def _bounded_memory() -> Generator[None]:
    """Raise MemoryError if the block takes more than `MOST_MEMORY` bytes; only on Linux.

    The block must not start threads.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = os.pread(_statm(), 100, 0).split()[0]
    limit = int(pages) * resource.getpagesize() + MOST_MEMORY
    limits = [limit, *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _bounded_time() -> Generator[None]:
    """Raise ValueError if the block takes over `MOST_SECONDS`; no limit outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise ValueError(f"it takes more than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@cache
def _statm() -> int:
    """Return an open descriptor of /proc/self/statm, cached because opening it is slow."""
    return os.open("/proc/self/statm", os.O_RDONLY)


def _file(model: str, name: str) -> Path | None:
    source = resolve(model)
    path = None if source.gguf_file is not None else config_file(source, name)
    return path if path is not None and path.is_file() else None


def _backend(model: str, file: Path) -> Any:  # noqa: ANN401 -- the package has no types
    # Imported here: only `evo-grpo check` needs it; it is a dependency of transformers.
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing finer
        raise ModelError(
            f"model {model!r}: {file} cannot be read: {shorten(str(error))}; fetch it anew"
        ) from error


def has_chat_template(name: str) -> bool | None:
    """Return whether a model's tokenizer has a chat template; see `chat_template_of`."""
    template = chat_template_of(name)
    return None if template is None else bool(template)


def chat_template_of(name: str) -> str | dict[str, str] | None:
    """Return a model's chat template, or its templates by name; "" without one, None if unknown."""
    source = resolve(name)
    if source.gguf_file is not None:
        header = gguf_header(name, Path(source.path) / source.gguf_file)
        return _template_in(header.values.get("tokenizer.chat_template"))
    own, config = (_file(name, file) for file in (_TEMPLATE, _CONFIG))
    files = [] if own is None else [own]
    if source.local:
        further = (Path(source.path) / _TEMPLATES).glob("*.jinja")
        files += sorted(file for file in further if file.is_file())
    if files:
        return {file.stem: _text_of(name, file) for file in files}
    if config is None:
        return None
    template = _template_in(read_object(name, config).get("chat_template"))
    if template or source.local:
        return template
    # Imported here: only a hub id needs it; it is a dependency of transformers.
    from huggingface_hub import try_to_load_from_cache

    # None: the file was never requested; otherwise the cache records that it does not exist.
    return None if try_to_load_from_cache(source.path, _TEMPLATE) is None else ""


def _template_in(value: object) -> str | dict[str, str]:
    """Convert the "chat_template" of a tokenizer's file; a list becomes templates by name."""
    if isinstance(value, list):
        entries = [entry for entry in cast("list[object]", value) if isinstance(entry, dict)]
        return {str(entry.get("name")): str(entry.get("template")) for entry in entries}
    return value if isinstance(value, str) else ""


def _text_of(name: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"model: {name!r}: {file} cannot be read: {error}") from error
