"""Chat templates and lengths of prompts that `check` reads, beside those of transformers."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
from transformers import AutoTokenizer

from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.cli.plan.render import _prompts
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.registry import build_task
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import ConfigError, ModelError, PromptTooLongError
from evo_grpo.settings import EnvConfig, from_dict
from evo_grpo.sources import embedded_models
from evo_grpo.training.sizing import prompt_lengths
from evo_grpo.training.sizing.prompt_lengths import FileTokenizer, has_chat_template, read_prompts

QUESTION = [{"role": "user", "content": "{question}"}]
BEGUN = [*QUESTION, {"role": "assistant", "content": "It is "}]
#: With what the templates of real models use: tags, white space, filters, functions, tokens.
JINJA = """{% for m in messages %}
    {%- if m.tools is defined %}{{ m.tools | tojson }}{% endif %}
    {% if m.role == "assistant" %}{% generation %}{{ m.content | trim }}{% endgeneration %}
    {% else %}{{ bos_token }}{{ m.role }}: {{ m.content }}{% endif %}
    {% if loop.index > 9 %}{% break %}{% endif %}
{% endfor %}{{ strftime_now("%Y") }}{% if add_generation_prompt %}A{{ brief }}:{% endif %}"""


@pytest.fixture
def model(tmp_path):
    """A copy of the embedded model's tokenizer, with a chat template of its own."""

    def make(template=JINJA):
        tokenizer = AutoTokenizer.from_pretrained(embedded_models()["tiny-sums"])
        tokenizer.chat_template = template
        tokenizer.bos_token = "<"
        tokenizer.save_pretrained(tmp_path / "model")
        source = embedded_models()["tiny-sums"]
        (tmp_path / "model" / "config.json").write_bytes((source / "config.json").read_bytes())
        return str(tmp_path / "model")

    return make


@pytest.mark.parametrize("asked", ["{question}=", QUESTION, BEGUN])
@pytest.mark.parametrize("name", ["tiny-sums", "tiny-foods", None])
def test_prompts_are_those_of_transformers_token_for_token(asked, name, model):
    path = model() if name is None else name
    template = Template.of(asked)
    rows = [{"question": text} for text in ("1+1", " two\n lines ", 'é "' * 50)]
    transformers = AutoTokenizer.from_pretrained(embedded_models().get(name, path))
    expected = template.render_all(rows, transformers)
    assert template.render_all(rows, FileTokenizer(path)) == expected


def rows_in(folder, count, longest=0):
    rows = [{"question": f"{n:03d}"} for n in range(count)]
    rows[longest]["question"] = "1" * 60
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "mine.py").write_text("def score(completion):\n    return 1.0\n")


def config(**changes):
    env = {"kind": "dataset", "train": "rows.jsonl", "reward": "mine:score"}
    settings = {"model": "tiny-sums", "env": env, "population": {"size": 2, "rounds": 1}}
    return from_dict({**settings, **changes})


def test_check_refuses_a_prompt_as_a_run_does_by_the_line_of_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows_in(tmp_path, 40, longest=31)
    settings = config(algorithm={"max_model_len": 60, "max_output_tokens": 4})
    with pytest.raises(PromptTooLongError) as told:
        make_plan(settings)
    assert str(told.value).startswith(
        "train (rows.jsonl), line 32: expected a prompt of at most 59"
    )
    tokenizer = AutoTokenizer.from_pretrained(embedded_models()["tiny-sums"])
    task = build_task(settings.env, 0, lambda *_: lambda completion: 1.0)
    with pytest.raises(PromptTooLongError) as refused:
        ReasoningGym.from_task(task, tokenizer, max_context_length=60)
    assert str(refused.value) == str(told.value)


def test_check_refuses_a_token_without_an_embedding_by_its_line(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    rows_in(tmp_path, 40)
    path = model()
    settings = tmp_path / "model" / "config.json"
    values = json.loads(settings.read_text())
    settings.write_text(json.dumps(values | {"vocab_size": 12}))
    with pytest.raises(ModelError, match=r"^train \(rows.jsonl\), line \d+: .* of 12 tokens: its"):
        make_plan(config(model=path))


def test_beyond_a_number_of_rows_a_sample_of_each_split_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows_in(tmp_path, 200)
    whole = make_plan(config()).prompts
    assert (whole.read, whole.rows, whole.most - whole.least) == (200, 200, 57)
    monkeypatch.setattr(prompt_lengths, "MOST_READ", 100)
    sample = make_plan(config()).prompts
    assert (sample.read, sample.rows) == (100, 200)
    assert _prompts(sample).endswith("tokens, in a sample of 100 of 200 rows")


def test_messages_that_the_chat_template_leaves_out_are_told_by_check_and_run(model):
    path = model(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    kind = {"kind": "dataset", "reward": len, "train": [{"question": f"{n}"} for n in range(20)]}
    env = EnvConfig(**(kind | {"reward": lambda completion: 1.0}), system_prompt="Add.")
    task = build_task(env, 0)
    _, _, (told,) = read_prompts(task, path, None, None)
    assert "leaves out messages of the role system, which the model will not see" in told
    with pytest.warns(UserWarning, match="leaves out messages of the role system"):
        ReasoningGym.from_task(task, AutoTokenizer.from_pretrained(path))
    assert read_prompts(build_task(env.replace(system_prompt=None), 0), path, None, None)[2] == []


def test_the_first_prompt_is_shown_as_the_model_gets_it(model):
    path = model("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    own = {"train": [{"question": f"{n}"} for n in range(20)], "reward": lambda completion: 1.0}
    task = build_task(EnvConfig(kind="dataset", **own, conversation=QUESTION), 0)
    first = read_prompts(task, path, None, None)[1]
    tokenizer = AutoTokenizer.from_pretrained(path)
    gym = ReasoningGym.from_task(task, tokenizer)
    asked = gym.row("train", 0)
    assert first.text == tokenizer.decode(asked.token_ids) == asked.text
    assert first.text.startswith("<")
    assert first.tokens == len(asked.token_ids)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, "it is nested too deep"),
        ("{{ 'a' * 10**9 }}", "roles user: it needs more than 104,857,600 bytes of memory"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "roles user: it takes more than 0.2 s",
        ),
        ("{{ 'a' * 2 * 10**6 }}", "it adds 1,9.*; expected at most 1,000,000"),
    ],
)
def test_a_template_without_an_end_is_refused(template, told, model, monkeypatch):
    monkeypatch.setattr(prompt_lengths, "MOST_SECONDS", 0.2)
    kind = {"kind": "dataset", "train": [{"question": f"{n}"} for n in range(20)]}
    task = build_task(EnvConfig(**kind, reward=lambda completion: 1.0), 0)
    made = model("{{ messages }}")
    (Path(made) / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=told):
        read_prompts(task, made, None, None)


def test_a_damaged_tokenizer_is_named(model, tmp_path):
    kind = {"kind": "dataset", "train": [{"question": f"{n}"} for n in range(20)]}
    task = build_task(EnvConfig(**kind, reward=lambda completion: 1.0), 0)
    model()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read: .*; fetch it anew"):
        read_prompts(task, str(tmp_path / "model"), None, None)


# --- chat templates

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


@pytest.mark.parametrize(
    ("files", "missing", "expected"),
    [
        ({}, (), None),  # nothing was downloaded
        ({"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE})}, (), True),
        ({"tokenizer_config.json": "{}"}, (), None),  # the other file was not asked for so far
        ({"tokenizer_config.json": "{}", "chat_template.jinja": TEMPLATE}, (), True),
        ({"tokenizer_config.json": "{}"}, ("chat_template.jinja",), False),
    ],
)
def test_of_a_hub_model_what_the_cache_holds_is_known(
    files, missing, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    root = tmp_path / "hub" / "models--owner--model"
    for file, text in (("refs/main", "abc"), *((f"snapshots/abc/{n}", t) for n, t in files.items()),
                       *((f".no_exist/abc/{n}", "") for n in missing)):  # fmt: skip
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    assert has_chat_template("owner/model") is expected
