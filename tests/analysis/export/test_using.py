"""An export is used without this package: its card's code runs as printed."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from gguf_files import write_gguf
from peft import PeftModel
from peft.tuners.lora import LoraModel
from safetensors.torch import load_file, save_file
from small_run import edited, small
from transformers import AutoModelForCausalLM, AutoTokenizer

from evo_grpo import run
from evo_grpo.analysis.export.contents import read_manifest
from evo_grpo.analysis.export.export import export
from evo_grpo.errors import CheckpointError, EngineUnavailable, ModelError
from evo_grpo.readers.report.run_page import write_report
from evo_grpo.readers.trackers.base import flat_settings
from evo_grpo.record.choice import choose_of
from evo_grpo.settings import from_dict
from evo_grpo.sources import embedded_digests, embedded_models, resolve

ROWS = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(30)]
REWARD = "def score(completion, answer):\n    return float(completion.endswith(answer))\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(small(algorithm__lr=1e-2), out=tmp_path_factory.mktemp("runs") / "sums-1")


@pytest.fixture
def own_data(tmp_path, monkeypatch):
    """A run on rows of the user's own, asked through a chat template."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("exported_reward.py").write_text(REWARD)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def play(**changes):
        config = small(
            population={"size": 2, "rounds": 1, "steps_per_round": 1},
            env={
                "kind": "dataset",
                "train": "rows.jsonl",
                "reward": "exported_reward:score",
                "conversation": [{"role": "user", "content": "{question}"}],
            },
            **changes,
        )
        return run(config, out=tmp_path / "run")

    return play


def blocks(folder):
    parts = (folder / "README.md").read_text().split("```python\n")[1:]
    return [part.split("```")[0] for part in parts]


def ran(code, folder):
    """Run code as somebody would who has no evo_grpo, in the folder of the export; its output."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    without = 'import sys; sys.modules["evo_grpo"] = None\n'
    done = subprocess.run(
        [sys.executable, "-c", without + code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def logits(model, text="12+07="):
    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny-sums").path)
    with torch.no_grad():
        return model.eval()(**tokenizer(text, return_tensors="pt")).logits


@pytest.mark.slow
def test_the_code_for_transformers_and_peft_runs_as_printed(finished, tmp_path):
    out = export(finished, tmp_path / "best")
    answer = ran(blocks(out)[0], out).strip()
    assert answer.isdigit()
    assert len(answer) <= 3


@pytest.mark.slow
def test_the_code_stops_where_the_run_does(tmp_path):
    played = run(
        small(algorithm__stop=["1", "7", 3], population__rounds=1), out=tmp_path / "sums-1"
    )
    export(played, tmp_path / "out")
    code, vllm = blocks(tmp_path / "out")
    assert "stop=['1', '7'], stop_token_ids=[3])" in vllm
    answers = [ran(code, tmp_path / "out") for _ in range(3)]
    assert not any(digit in answer for answer in answers for digit in "17")


@pytest.mark.slow
def test_a_merged_export_is_an_ordinary_model_with_the_same_logits(finished, tmp_path):
    out = export(finished, tmp_path / "merged", merge=True)
    assert not (out / "adapter_config.json").exists()
    adapter = export(finished, tmp_path / "best")
    base = AutoModelForCausalLM.from_pretrained(resolve("tiny-sums").path)
    expected = logits(PeftModel.from_pretrained(base, str(adapter)))
    plain = logits(AutoModelForCausalLM.from_pretrained(resolve("tiny-sums").path))
    found = logits(AutoModelForCausalLM.from_pretrained(out))
    assert (expected - found).abs().max() < 1e-5
    assert (plain - found).abs().max() > 1e-3
    assert ran(blocks(out)[0], out).strip().isdigit()
    card = (out / "README.md").read_text()
    assert "merged into the weights in float32; they are stored in float32." in card
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "transformers"


def test_a_merged_model_is_stored_as_its_base_is(over_half, tmp_path):
    """The base of bfloat16 ran in float32; the merged weights are rounded once, at the end."""
    out = export(over_half, tmp_path / "merged", merge=True)
    weights = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "they are stored in bfloat16" in (out / "README.md").read_text()


@pytest.fixture(scope="module")
def over_half(tmp_path_factory):
    """A run over a local folder, `half` beside it, with the embedded base in bfloat16."""
    place = tmp_path_factory.mktemp("half")
    base = AutoModelForCausalLM.from_pretrained(resolve("tiny-sums").path).to(torch.bfloat16)
    base.save_pretrained(place / "half")
    AutoTokenizer.from_pretrained(resolve("tiny-sums").path).save_pretrained(place / "half")
    config = small(population__rounds=1, model__name=str(place / "half"))
    return run(config, out=place / "over-half")


@pytest.mark.slow
def test_a_base_in_a_local_folder_is_named_by_its_whole_path(over_half, tmp_path):
    out = export(over_half, tmp_path / "best")
    named = json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(over_half.with_name("half"))
    assert not (out / "base").exists()
    assert (out / "tokenizer_config.json").is_file()
    assert ran(blocks(out)[0], out).strip()


def test_no_row_of_the_users_own_leaves_with_what_is_shared(own_data, tmp_path):
    folder = own_data()
    for rows, template, hidden in (
        (2, {}, '"content": "..."'),
        (
            ROWS[20:22],
            {"env__conversation": None, "env__prompt": "{question:>9}\n"},
            r"...\n...\n\n",
        ),
    ):
        few_shot = {"rows": rows, "answer": "{answer}"}
        config = edited(folder, env__few_shot=few_shot, **template)
        card = (export(folder, tmp_path / "best", force=True) / "README.md").read_text()
        page = write_report(folder, tmp_path / "page.html", samples=False).read_text()
        tracked = str(flat_settings(from_dict(config)))
        questions = [f"{n}+{n}=" for n in range(10, 30)]
        assert not any(one in text for one in questions for text in (card, page, tracked))
        own_page = write_report(folder).read_text()
        assert any(one in own_page for one in questions)
        assert "trained with 2 solved examples in front of each question" in card
        assert card.count(hidden) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "printed", "then"),
    [
        ({"conversation": None, "prompt": "{{{a:03d}}} {question}"}, '"a": 0', ""),
        (
            {
                "conversation": [
                    {"role": "user", "content": "{question}"},
                    {"role": "assistant", "content": "0"},
                ]
            },
            "continue_final_message=True",
            "",
        ),
        (
            {
                "conversation": [{"role": "messages", "content": "{question}"}],
                "system_prompt": "Add.",
            },
            "messages",
            'assert [m["role"] for m in messages] == ["system", "user"]',
        ),
    ],
    ids=["a template that takes a number", "a prefilled answer", "a column of messages"],
)
def test_the_code_asks_as_the_template_says(own_data, tmp_path, env, printed, then):
    folder = own_data()
    edited(folder, **{f"env__{name}": value for name, value in env.items()})
    code = blocks(export(folder, tmp_path / "best"))[0]
    assert printed in code
    ran(f"{code}\n{then}", tmp_path / "best")


def test_a_base_of_the_hub_is_named_and_its_tokenizer_is_there_or_told_of(
    finished, tmp_path, monkeypatch
):
    """Without network and cache its tokenizer cannot be had: the export names the base's."""
    config = yaml.safe_load((finished / "population.yaml").read_text())
    config["model"] |= {"name": "owner/base", "config": {"revision": "v1"}}
    copy = shutil.copytree(finished, tmp_path / "run")
    (copy / "population.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.warns(UserWarning, match="no tokenizer of its own, use that of its base: model"):
        out = export(copy, tmp_path / "best")
    said = json.loads((out / "adapter_config.json").read_text())
    assert (said["base_model_name_or_path"], said["revision"]) == ("owner/base", "v1")
    assert not (out / "base").exists()
    assert 'AutoTokenizer.from_pretrained("owner/base")' in blocks(out)[0]
    assert (
        'LLM("owner/base", dtype="float32", enable_lora=True, max_lora_rank=8, rev'
        in blocks(out)[1]
    )


@pytest.mark.slow
def test_a_gguf_base_is_written_as_safetensors(tmp_path):
    vocabulary = AutoTokenizer.from_pretrained(resolve("tiny-sums").path).get_vocab()
    tokens = ["Ġ" if t == " " else t for t in sorted(vocabulary, key=vocabulary.get)]
    for number, merged in enumerate(("01", "10")):  # the merges of `write_gguf`
        tokens[tokens.index(f"<reserved_{number}>")] = merged
    model = tiny.llama(vocab_size=len(tokens), tie_word_embeddings=True)
    write_gguf(model, tmp_path / "tiny.gguf", tokens)
    config = small(population__rounds=1, model__name=str(tmp_path / "tiny.gguf"))
    with pytest.warns(UserWarning, match="nothing to learn from"):
        folder = run(config, out=tmp_path / "run")
    out = export(folder, tmp_path / "best")
    merged = export(folder, tmp_path / "merged", merge=True)
    (tmp_path / "tiny.gguf").unlink()  # nothing of it is needed any more
    assert (
        "the weights of the dequantised GGUF file in float32" in (merged / "README.md").read_text()
    )
    ran(blocks(merged)[0], merged)
    written = load_file(out / "base" / "model.safetensors")
    own = model.state_dict()
    assert written.keys() >= {"model.norm.weight"}
    assert all(torch.allclose(tensor, own[name]) for name, tensor in written.items())
    assert "dequantised, in float32" in (out / "README.md").read_text()
    ran(blocks(out)[0], out)


def test_a_base_that_has_changed_is_refused(over_half, tmp_path):
    folder = shutil.copytree(over_half, tmp_path / "run")
    base = shutil.copytree(over_half.with_name("half"), tmp_path / "half")
    edited(folder, model__name=str(base))
    weights = load_file(base / "model.safetensors")
    changed = {name: 1.5 * tensor for name, tensor in weights.items()}
    save_file(changed, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="expected the weights with which the adapter"):
        export(folder, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("merged_first", [True, False])
def test_another_kind_of_export_replaces_one_and_leaves_nothing_of_it(
    finished, tmp_path, merged_first
):
    """An adapter_config.json beside a merged model would have it loaded as an adapter."""
    out = tmp_path / "out"
    export(finished, out, merge=merged_first)
    export(finished, out, merge=not merged_first, force=True)
    alone = export(finished, tmp_path / "alone", merge=not merged_first)
    assert names_in(out) == names_in(alone)
    assert (out / "base").exists() == merged_first
    assert set(read_manifest(out)["files"]) == names_in(alone) - {"export.json"}


def names_in(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_the_manifest_says_what_was_exported(finished, tmp_path):
    out = export(finished, tmp_path / "out", agent=1, round=0)
    said, record = read_manifest(out), choose_of(finished, agent=1, round=0).agent.record
    assert (said["run"], said["agent"], said["member"], said["round"]) == (
        *("sums-1", 1, record.member),
        0,
    )
    assert said["base"] == "tiny-sums"
    for name, digest in said["files"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine__quantization": "int8"}, "the adapter was trained over it in int8"),
        ({"model__trust_remote_code": True}, "comes with Python of its own"),
        ({"model__name": "no such model"}, "it was given as an object, or is not found"),
    ],
)
def test_what_cannot_be_merged_is_refused(finished, tmp_path, change, message):
    folder = shutil.copytree(finished, tmp_path / "run")
    edited(folder, **change)
    with pytest.raises(ModelError, match=message + ".*export without --merge"):
        export(folder, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


def test_a_merged_model_that_answers_otherwise_is_refused(finished, tmp_path, monkeypatch):
    real = LoraModel.merge_and_unload

    def wrong(self, *arguments, **given):
        model = real(self, *arguments, **given)
        model.model.norm.weight.data *= 1.1
        return model

    monkeypatch.setattr(LoraModel, "merge_and_unload", wrong)
    with pytest.raises(ModelError, match=r"got a difference of .* nats"):
        export(finished, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


def test_a_base_that_is_not_on_this_machine_says_how_to_fetch_it(finished, tmp_path, monkeypatch):
    folder = shutil.copytree(finished, tmp_path / "run")
    edited(folder, model__name="smollm2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("EVO_GRPO_CACHE", str(tmp_path / "no models"))
    with pytest.raises(EngineUnavailable, match="evo-grpo fetch smollm2"):
        export(folder, tmp_path / "out")


def test_every_embedded_model_can_be_exported():
    found = {name: {p.name for p in place.iterdir()} for name, place in embedded_models().items()}
    assert {name: set(files) for name, files in embedded_digests().items()} == found
