"""An export on the Hub: one commit with its files, and errors that say what to do; no network."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from shown_run import run_folder

from evo_grpo import sources
from evo_grpo.analysis.export import export as export_module
from evo_grpo.analysis.export.contents import Contents, find_base
from evo_grpo.analysis.export.export import export
from evo_grpo.errors import ConfigError, RunFailedError
from evo_grpo.record.choice import choose_of
from evo_grpo.settings import from_dict
from evo_grpo.sources import resolve


class Hub:
    """A double of HfApi that notes what it is asked for."""

    made = None

    def __init__(self, token=None):
        self.token, self.commits, self.created = token, [], []
        Hub.made = self

    def _called(self, name):
        if name in Hub.failing:
            raise Hub.failing[name]

    failing: ClassVar[dict[str, Exception]] = {}
    holding: ClassVar[list[str]] = []

    def create_repo(self, repo_id, *, private, exist_ok):
        self._called("create_repo")
        self.created.append((repo_id, private, exist_ok))

    def list_repo_files(self, repo_id):
        self._called("list_repo_files")
        return Hub.holding

    def create_commit(self, repo_id, operations, *, commit_message):
        self._called("create_commit")
        self.commits.append((repo_id, operations, commit_message))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(Hub, "made", None)
    monkeypatch.setattr(Hub, "failing", {})
    monkeypatch.setattr(Hub, "holding", [])
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return Hub


def over(name):
    return from_dict({"model": name, "env": "sums"})


@pytest.fixture
def run(tmp_path):
    return run_folder(tmp_path / "one", adapter=True)


def test_the_files_of_the_export_go_there_in_one_commit(hub, run, tmp_path):
    out = export(run, tmp_path / "out", push="me/sums")
    assert hub.made.token == "hf_secret"
    assert hub.made.created == [("me/sums", True, True)]
    ((name, operations, message),) = hub.made.commits
    assert (name, message) == ("me/sums", "Export from evo-grpo")
    added = {one.path_in_repo: one.path_or_fileobj for one in operations}
    assert all(isinstance(one, CommitOperationAdd) for one in operations)
    written = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert set(added) == written
    assert all(data == str(out / name) for name, data in added.items())


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("tiny-sums", None),
        ("owner/base", "owner/base"),
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("base", None),
    ],
)
def test_the_card_names_a_base_as_the_hub_knows_it_or_not_at_all(
    hub, run, tmp_path, monkeypatch, name, known
):
    """The Hub refuses a card whose base_model is none of its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(resolve("tiny-sums").path, tmp_path / "base")
    Path("fetched.gguf").touch()
    monkeypatch.setattr(sources, "installed", lambda name: tmp_path / "fetched.gguf")
    monkeypatch.setattr(export_module, "adapter_contents", lambda *_: Contents({}))
    base = find_base(choose_of(run), over(name).model, b"{}")
    monkeypatch.setattr(export_module, "find_base", lambda *_: base)
    card = (export(run, tmp_path / "out") / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1]).get("base_model") == known
    assert str(tmp_path) not in card.split("## Use")[0]


def test_the_pushed_card_brings_the_export_here(hub, run, tmp_path):
    card = (export(run, tmp_path / "out", push="me/sums") / "README.md").read_text()
    assert 'os.chdir(snapshot_download("me/sums"))' in card
    assert "Run anywhere" in card


def test_what_an_earlier_export_left_there_is_removed_and_nothing_else(hub, run, tmp_path):
    hub.holding = [".gitattributes", "config.json", "model.safetensors", "notes.md", "README.md"]
    export(run, tmp_path / "out", push="me/sums")
    deleted = [
        one.path_in_repo for one in hub.made.commits[0][1] if isinstance(one, CommitOperationDelete)
    ]
    assert deleted == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("token", [None, "", "  "])
def test_without_a_token_nothing_is_written(hub, run, tmp_path, monkeypatch, token):
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match=r"write access in the environment, as HF_TOKEN, got no"):
        export(run, tmp_path / "out", push="me/sums")
    assert not (tmp_path / "out").exists()
    assert hub.made is None


@pytest.mark.parametrize("name", ["", "sums", "a/b/c", "me/su ms", "\x1b/x"])
def test_a_name_that_is_no_repository(hub, run, tmp_path, name):
    with pytest.raises(ConfigError, match="push: expected a repository of the Hub as owner/name"):
        export(run, tmp_path / "out", push=name)
    assert not (tmp_path / "out").exists()


def test_a_base_in_a_folder_is_not_pushed_and_nothing_is_written(hub, run, tmp_path, monkeypatch):
    there = find_base(choose_of(run), over(resolve("tiny-sums").path).model, b"{}")
    monkeypatch.setattr(export_module, "find_base", lambda *_: there)
    with pytest.raises(ConfigError, match="a folder of this machine; push one model with --merge"):
        export(run, tmp_path / "out", push="me/sums")
    assert not (tmp_path / "out").exists()


def refused(status):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError("refused", response=response)


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        ("create_repo", HTTPError("no route"), "the Hub cannot be reached; check the network"),
        ("create_repo", refused(401), "the Hub refuses the token in HF_TOKEN, which needs write"),
        ("list_repo_files", ConnectionError("refused"), "the Hub cannot be reached"),
        ("create_commit", refused(403), "the Hub refuses the token in HF_TOKEN"),
        ("create_commit", refused(500), "the Hub refused"),
    ],
)
def test_what_the_hub_or_the_network_refuse_is_named_and_the_export_stays(
    hub, run, tmp_path, error, message, step
):
    hub.failing = {step: error}
    with pytest.raises(RunFailedError, match=message) as caught:
        export(run, tmp_path / "out", push="me/sums")
    assert f"the export in {tmp_path / 'out'} is complete: push it again with --force" in str(
        caught.value
    )
    assert "hf_secret" not in str(caught.value)
    assert (tmp_path / "out" / "adapter_config.json").is_file()
