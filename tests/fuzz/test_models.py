"""Any file of a model: its size and its template, or an error, in bounded time and memory."""

import json
import resource
import shutil
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from fuzzing import fuzz, told_or
from hypothesis import example
from hypothesis import strategies as st

from evo_grpo.errors import EvoGrpoError, ModelError
from evo_grpo.settings import from_dict
from evo_grpo.sources import resolve
from evo_grpo.training.sizing.model_size import read_model_size

CONFIG = json.loads((Path(resolve("tiny-sums").path) / "config.json").read_text())
ODD = st.sampled_from([
    None, "", "x", [], {}, [1], {"a": 1}, -1, 0, 1, 2**31, 10**8, 10**30, -0.5, 1e-300, 1e308, True,
]) | st.just(float("nan"))  # fmt: skip
MOST_KILOBYTES = 1_000_000
"""Most memory that all inputs together may take beside what the process has at first."""


def bounded(check):
    """Return the property, with the memory of the process bounded."""

    def checked(**drawn):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        check(**drawn)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KILOBYTES

    checked.__name__, checked.__doc__ = check.__name__, check.__doc__
    checked.__module__ = check.__module__
    return checked


def model_folder() -> Path:
    folder = Path("model")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve("tiny-sums").path) / name, folder)
    return folder


def planned(folder: Path) -> None:
    """Check a run of the model, as `evo-grpo check` does."""
    from evo_grpo.cli.plan.plan import make_plan

    config = {"model": str(folder), "env": {"kind": "sums", "conversation": [
        {"role": "user", "content": "{question}"}]}}  # fmt: skip
    told_or(lambda: make_plan(from_dict(config)), EvoGrpoError)


@fuzz(quick=60, changes=st.dictionaries(st.sampled_from(sorted(CONFIG)), ODD, max_size=3))
@example(changes={"rms_norm_eps": None})
@example(changes={"num_hidden_layers": 100_000_000})
@example(changes={"head_dim": 0})
@bounded
def test_any_config_is_a_plan_or_refused(changes: dict[str, object]):
    folder = model_folder()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    planned(folder)


DEEP = st.integers(0, 5000).map(lambda n: "[" * n + "]" * n)
HEADERS = st.dictionaries(
    st.text(max_size=3),
    st.fixed_dictionaries({"shape": st.lists(ODD, max_size=3) | ODD, "dtype": ODD}) | ODD,
    max_size=3,
).map(json.dumps)


@fuzz(header=HEADERS | DEEP | st.text(max_size=20), longer=st.integers(-10, 2**63))
@example(header='{"a": {"shape": ["aaaaaaaa", 1000000000]}}', longer=0)
@example(header="[" * 100_000, longer=0)
@bounded
def test_any_header_of_safetensors_is_a_size_or_refused(header: str, longer: int):
    folder, text = model_folder(), header.encode()
    length = min(max(0, len(text) + longer), 2**64 - 1).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(length + text)
    told_or(partial(read_model_size, str(folder)), ModelError)


def gguf_bytes() -> bytes:
    writer = gguf.GGUFWriter("whole.gguf", "llama")
    for add, value in (
        (writer.add_embedding_length, 16), (writer.add_feed_forward_length, 40),
        (writer.add_block_count, 1), (writer.add_head_count, 4), (writer.add_context_length, 64),
    ):  # fmt: skip
        add(value)
    writer.add_token_list(["a", "b"])
    writer.add_array("nested", [[1, 2], [3, 4]])
    writer.add_tensor("token_embd.weight", np.zeros((32, 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path("whole.gguf").read_bytes()


@fuzz(
    quick=100,
    changes=st.lists(st.tuples(st.integers(0, 700), st.binary(min_size=1, max_size=8)), max_size=3),
)
@example(changes=[(8, b"\xff" * 8)])
@example(changes=[(16, b"\xff" * 8)])
@bounded
def test_any_gguf_is_a_size_or_refused(changes: list[tuple[int, bytes]]):
    content = bytearray(gguf_bytes())
    for place, new in changes:
        content[place : place + len(new)] = new
    Path("model.gguf").write_bytes(content)
    told_or(partial(read_model_size, "model.gguf"), ModelError)


PARTS = st.sampled_from([
    "{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ 1/0 }}",
    "{{ raise_exception('no') }}", "{% if", "%}", "{{", "}}", "{# ", "{{ range(10**9)|list }}",
    "{{ messages[9] }}", "{{ ''.__class__ }}", "{% set x = x %}", "\0", "é",
    "{{ 'a' * 10**10 }}", "{{ 'a' * 10**7 }}", "{% set ns = namespace(x='a') %}",
    "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "{{ ns.x }}",
])  # fmt: skip


@fuzz(template=st.lists(PARTS, max_size=6).map("".join) | DEEP.map(lambda d: "{{" + d + "}}"))
@example(template="{{" + "(" * 5000)
@example(template="{{ 'a' * 10**10 }}")
@example(template="{{ 'a' * 10**7 }}")
@bounded
def test_any_chat_template_is_a_prompt_or_refused(template: str):
    folder = model_folder()
    given = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**given, "chat_template": template}))
    planned(folder)
