"""A checkpoint or an adapter from somebody else: no link out of it, no pipe, no endless file."""

import os
import shutil

import pytest
from small_run import small

from evo_grpo import run
from evo_grpo.analysis.export.export import export
from evo_grpo.analysis.sampling.evaluation import evaluate_adapter
from evo_grpo.api.agent import GRPO
from evo_grpo.errors import CheckpointError, EvoGrpoError
from evo_grpo.settings import from_dict

CONFIG = {"model": "tiny-sums", "env": "sums", "engine": {"device": "cpu"}}
FILES = (
    *("attributes.json", "optimizer.safetensors", "actor", "actor/adapter_config.json"),
    *("actor/adapter_model.safetensors", "reference", "base"),
    *("base/config.json", "base/model.safetensors", "base/tokenizer.json"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint with all that one can have, and a finished run with its export."""
    place = tmp_path_factory.mktemp("made")
    agent = GRPO(model="tiny-sums", separate_reference=True, beta=0.01, seed=1, device="cpu")
    agent.save_checkpoint(place / "agent", lora_only=False)
    run(small(population__rounds=1), out=place / "run")
    export(place / "run", place / "export")
    return place


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made, tmp_path / "made")
    return tmp_path / "made"


def link(path, outside):
    path.rename(outside)
    path.symlink_to(outside)


def pipe(path, outside):
    link(path, outside)
    path.unlink()
    os.mkfifo(path)


def sparse(path, outside):
    with path.open("r+b") as file:
        file.truncate(20 << 30)


PLANTS = {"a link": link, "a pipe": pipe}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_is_not_read_through_links_nor_pipes(folder, tmp_path, name, plant):
    file = folder / "agent" / name
    if name == "optimizer.safetensors":
        file.touch()  # one that has learned nothing has none
    PLANTS[plant](file, tmp_path / "outside")
    with pytest.raises(CheckpointError, match=f"{name}: expected a regular file or folder of its"):
        GRPO.load(folder / "agent", device="cpu")
    agent = GRPO(model="tiny-sums", seed=1, device="cpu")
    with pytest.raises(CheckpointError, match="expected a regular file or folder of its own"):
        agent.load_checkpoint(folder / "agent")


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("below", ["", "actor"])
def test_nor_is_an_adapter(folder, tmp_path, name, plant, below):
    place = folder / "export" / below
    if below:
        place.mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / "export" / file).rename(place / file)
    PLANTS[plant](place / name, tmp_path / "outside")
    agent = GRPO(model="tiny-sums", seed=1, device="cpu")
    calls = [
        lambda: agent.load_checkpoint(folder / "export"),
        lambda: evaluate_adapter(folder / "export", from_dict(CONFIG), prompts=1, base=False),
    ]
    if not below:
        calls.append(lambda: GRPO(model="tiny-sums", adapter=str(folder / "export"), device="cpu"))
    for call in calls:
        with pytest.raises(CheckpointError, match=f"{name}: expected a regular file or folder"):
            call()


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", ["actor", "actor/adapter_config.json"])
def test_nor_is_the_checkpoint_of_a_run(folder, tmp_path, name, plant):
    for place in (folder / "run" / "checkpoints").glob("round-*/agent-*"):
        PLANTS[plant](place / name, tmp_path / f"outside-{place.name}")
    with pytest.raises(EvoGrpoError, match="expected a regular file or folder of its own"):
        evaluate_adapter(folder / "run", prompts=1, base=False)


@pytest.mark.parametrize(
    "name", ["agent/attributes.json", "agent/actor/adapter_config.json", "agent/base/config.json"]
)
def test_a_sparse_file_of_gigabytes_is_refused_unread(folder, name):
    sparse(folder / name, None)
    with pytest.raises(CheckpointError, match=r"expected a file of at most 67,108,864 bytes, got"):
        GRPO.load(folder / "agent", device="cpu")


def test_a_folder_reached_by_a_link_and_what_else_lies_in_it_are_left_alone(folder, tmp_path):
    (tmp_path / "by-link").symlink_to(folder / "agent")
    (folder / "agent" / "mine").symlink_to(tmp_path)
    assert GRPO.load(tmp_path / "by-link", device="cpu").steps == 0
