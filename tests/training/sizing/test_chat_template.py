"""What the files say of a chat template, against what transformers loads from them."""

import json
import shutil

import gguf
import pytest
from transformers import AutoTokenizer

from evo_grpo.errors import ModelError
from evo_grpo.sources import embedded_models
from evo_grpo.training.sizing.prompt_lengths import has_chat_template

TEMPLATE = "{{ messages[0]['content'] }}"


@pytest.fixture
def folder(tmp_path):
    """A model whose tokenizer has no chat template."""
    made = tmp_path / "model"
    shutil.copytree(embedded_models()["tiny-sums"], made)
    configure(made, chat_template=None)
    return made


def configure(folder, **settings):
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def agreed(folder):
    """What transformers has loaded, which must be what was foretold."""
    found = has_chat_template(str(folder))
    assert found == bool(AutoTokenizer.from_pretrained(folder).chat_template)
    return found


def test_beside_no_limit_of_tokens_which_transformers_writes_as_a_long_integer(folder):
    configure(folder, chat_template=TEMPLATE, model_max_length=int(1e30))
    assert agreed(folder)


@pytest.mark.parametrize("name", embedded_models())
def test_the_embedded_models_have_one(name):
    assert has_chat_template(name)


@pytest.mark.parametrize(
    ("template", "expected"),
    [(TEMPLATE, True), ([{"name": "default", "template": TEMPLATE}], True), ("", False)],
)
def test_in_the_configuration(folder, template, expected):
    assert not agreed(folder)
    configure(folder, chat_template=template)
    assert agreed(folder) is expected


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tools.jinja"])
def test_in_a_file_of_its_own(folder, name):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(TEMPLATE)
    assert agreed(folder) is True


def test_without_a_configuration_nothing_is_said(folder):
    (folder / "tokenizer_config.json").unlink()
    assert has_chat_template(str(folder)) is None


@pytest.mark.parametrize(
    ("content", "message"), [("{", "cannot be read as JSON"), ("[]", "expected an object in")]
)
def test_a_damaged_configuration(folder, content, message):
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        has_chat_template(str(folder))


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_in_a_gguf_file(tmp_path, template):
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert has_chat_template(str(file)) is (template is not None)


class TestHub:
    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        self.root = tmp_path / "hub" / "models--owner--model"

    def cached(self, name, content, missing=False):
        """A file as the hub's cache keeps it, or its record that the hub has no such file."""
        (self.root / "refs").mkdir(parents=True, exist_ok=True)
        (self.root / "refs" / "main").write_text("abc")
        file = self.root / (".no_exist" if missing else "snapshots") / "abc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    def test_nothing_downloaded(self):
        assert has_chat_template("owner/model") is None

    def test_in_the_configuration(self):
        self.cached("tokenizer_config.json", json.dumps({"chat_template": TEMPLATE}))
        assert has_chat_template("owner/model") is True

    def test_in_a_file_of_its_own(self):
        self.cached("tokenizer_config.json", "{}")
        assert has_chat_template("owner/model") is None  # not asked for so far
        self.cached("chat_template.jinja", TEMPLATE)
        assert has_chat_template("owner/model") is True

    def test_none(self):
        self.cached("tokenizer_config.json", "{}")
        self.cached("chat_template.jinja", "", missing=True)
        assert has_chat_template("owner/model") is False
