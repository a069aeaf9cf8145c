"""Whatever stands in the files of a run and of a checkpoint: it is read, or refused by name."""

import functools
import hashlib
import json
import shutil
import struct
import tempfile
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import fuzz, is_told, told_or
from hypothesis import example
from hypothesis import strategies as st
from small_run import small
from typer.testing import CliRunner

from evo_grpo import GRPO, run
from evo_grpo.cli.commands import app
from evo_grpo.errors import EvoGrpoError
from evo_grpo.record.files import seal, unseal
from evo_grpo.record.folder import read_rounds

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.integers() | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["lr", "F32", "../x", "actor", "clone", "all-linear", "tiny-sums", 10**400]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)  # fmt: skip
#: Which node of a document, counted from its root on, and what takes its place; None removes it.
CHANGES = st.lists(
    st.tuples(st.integers(0, 600), st.none() | st.tuples(VALUES)), min_size=1, max_size=3
)
Changes = list[tuple[int, tuple[object] | None]]


@functools.cache
def finished() -> Path:
    """A run of two rounds, whose files are damaged in copies."""
    folder = Path(tempfile.mkdtemp()) / "run"
    run(small(population__rounds=2), out=folder)
    return folder


def changed(document: Any, changes: Changes) -> Any:
    """Return a JSON document in which some nodes are others, or are gone."""
    document = deepcopy(document)
    for number, change in changes:
        places = list(nodes(document))
        if not places:
            break
        inside, key = places[number % len(places)]
        if change is not None:
            inside[key] = change[0]
        else:
            del inside[key]
    return document


def nodes(inside: Any):
    """Yield where each node stands: in what, by which key or index."""
    keys = list(inside) if isinstance(inside, dict) else range(len(inside))
    for key in keys:
        yield inside, key
        if isinstance(inside[key], dict | list):
            yield from nodes(inside[key])


def shown(content: bytes) -> None:
    """Look at a run folder with these rounds: they are read or refused, by the commands too."""
    folder = Path("run")
    folder.mkdir(exist_ok=True)
    shutil.copyfile(finished() / "population.yaml", folder / "population.yaml")
    (folder / "rounds.jsonl").write_bytes(content)
    rounds = told_or(lambda: read_rounds(folder))
    for command in ("leaderboard", "lineage"):
        result = CliRunner().invoke(app, [command, str(folder)])
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert result.exit_code in ((0, 1, 2) if rounds is not None else (1, 2)), result.output
        if result.exit_code:
            assert result.stderr.strip()


@pytest.mark.slow
@fuzz(quick=40, line=st.integers(0, 1), changes=CHANGES)
def test_any_sealed_round_is_read_or_refused(line: int, changes: Changes):
    lines = (finished() / "rounds.jsonl").read_bytes().splitlines()
    document = changed(unseal(lines[line]), changes)
    lines[line] = seal(document).strip().encode()
    shown(b"\n".join(lines) + b"\n")


@pytest.mark.slow
@fuzz(quick=40, start=st.floats(0, 1), length=st.integers(0, 80), content=st.binary(max_size=80))
@example(start=0.0, length=0, content=b"\xef\xbb\xbf")
@example(start=1.0, length=0, content=b"\0")
def test_any_damaged_line_is_read_or_refused(start: float, length: int, content: bytes):
    whole = (finished() / "rounds.jsonl").read_bytes()
    at = round(start * len(whole))
    shown(whole[:at] + content + whole[at + length :])


@functools.cache
def checkpoint() -> dict[str, bytes]:
    """The files of an agent, by their paths."""
    folder = finished() / "checkpoints" / "round-0001" / "agent-00"
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def loads(files: dict[str, bytes]) -> None:
    """An agent of these files is loaded or refused."""
    folder = Path("agent")
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            # PEFT's, of patterns that match no module.
            warnings.simplefilter("ignore")
            GRPO.load(folder, device="cpu")
    except EvoGrpoError as error:
        is_told(error)
    finally:
        torch.set_num_threads(threads)  # engine.threads of the checkpoint holds for the process


def with_digests(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return files whose digests are what attributes.json says: as somebody would forge them."""
    attributes = json.loads(files["attributes.json"])
    for name in attributes["files"]:
        attributes["files"][name] = hashlib.sha256(files[name]).hexdigest()
    return {**files, "attributes.json": json.dumps(attributes).encode()}


@pytest.mark.slow
@fuzz(quick=25, changes=CHANGES)
@example(changes=[(370, ({"": ""},))])
def test_any_attributes_are_loaded_or_refused(changes: Changes):
    document = changed(json.loads(checkpoint()["attributes.json"]), changes)
    loads({**checkpoint(), "attributes.json": json.dumps(document).encode()})


@pytest.mark.slow
@fuzz(quick=25, changes=CHANGES)
@example(changes=[(2, None), (1, ({"": 10**400},))])
def test_any_adapter_config_is_loaded_or_refused(changes: Changes):
    name = "actor/adapter_config.json"
    document = changed(json.loads(checkpoint()[name]), changes)
    loads(with_digests({**checkpoint(), name: json.dumps(document).encode()}))


@pytest.mark.slow
@fuzz(
    quick=25,
    name=st.sampled_from(["actor/adapter_model.safetensors", "optimizer.safetensors"]),
    changes=CHANGES,
    longer=st.sampled_from([0, 0, 0, -1, 1, 2**40, -(2**20)]),
)
def test_any_header_of_tensors_is_loaded_or_refused(name: str, changes: Changes, longer: int):
    content = checkpoint()[name]
    size = struct.unpack("<Q", content[:8])[0]
    header = json.dumps(changed(json.loads(content[8 : 8 + size]), changes)).encode()
    told = struct.pack("<Q", max(0, len(header) + longer))
    loads(with_digests({**checkpoint(), name: told + header + content[8 + size :]}))
