"""What no configuration may hold: too much, too deep, too long, or what is no text."""

from pathlib import Path

import pytest

from evo_grpo.errors import ConfigError
from evo_grpo.schema import messages, search_space
from evo_grpo.settings import RunConfig, from_dict, load, to_yaml
from evo_grpo.settings.yaml import MAX_YAML_BYTES

MINIMAL = "model: tiny-sums\nenv: sums\n"
SETTINGS = {"model": "tiny-sums", "env": "sums"}


@pytest.fixture
def refused(tmp_path: Path):
    """`refused(text, *overrides)`: the message, without the folder."""

    def message(text: str | bytes, *overrides: str) -> str:
        path = tmp_path / "population.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ConfigError) as caught:
            load(path, overrides)
        return str(caught.value).replace(str(tmp_path) + "/", "")

    return message


QUOTES = "put a string in quotes"
REFUSED = [
    # too much, too deep, too long
    (
        "#" * (MAX_YAML_BYTES + 1),
        "population.yaml: expected at most 1,048,576 bytes of YAML, got m",
    ),
    *(
        (text, "population.yaml: expected YAML, but its lists and mappings are nested too deeply")
        for text in ("[" * 100_000, "{a: " * 20_000, "- " * 20_000)
    ),
    ("env: &a [*a]", "expected plain values, but one contains itself"),
    ("&a {model: [[*a]]}", "expected plain values, but one contains itself"),
    (f"{MINIMAL}seed: {'1' * 21}", "seed: expected an integer of at most 20 digits, got 1111"),
    (f"{MINIMAL}seed: {'1' * 5000}", "line 3, column 7: expected an integer, got 1111"),
    *(
        (f"{MINIMAL}seed: {number}", "expected an integer of at most 20 digits")
        for number in ("0x" + "f" * 17, "-0b" + "1" * 67, "1" + ":59" * 12)
    ),
    # no YAML
    ("", "population.yaml: expected a mapping with the keys name"),
    ("[1, 2]", "population.yaml: expected a mapping with the keys name"),
    ("model: [a", "line 1, column 10: expected YAML"),
    ("model: a\nmodel: b", "line 2, column 1: expected YAML, but the key 'model' occurs twice"),
    ("--- a\n--- b", "line 2, column 1: expected YAML, but found another document"),
    (f"{MINIMAL}1: 2", "expected strings as keys, got 1"),
    ("model: m\nenv: {kind: sums, 3: 4}", "env[3]: expected a string as key"),
    *(
        (f"env: sums\nmodel: {value}", "population.yaml, line 2, column ")
        for value in (
            *("!!int abc", '!!int ""', "!!int [1]", "!!bool maybe", "!!float x", "!!timestamp x"),
            *("0b_", "0x_", "!!map 5", "!!map [1]", "!!seq 5", "!!set {a}", "!!binary aGk="),
            *("!!omap [a: 1]", "!mine 1", "{[a]: 1}", "1" + ":59" * 200 + ".5"),
            "!!python/object:os.system {}",
        )
    ),
    # a string that YAML reads as something else
    ("name: 2026-01-01", f"name: expected a string, got the date 2026-01-01; {QUOTES}"),
    ("name: 012", f"name: expected a string, got 10; {QUOTES}"),
    ("name: yes", f"name: expected a string, got true; {QUOTES}"),
    ("name: 1e3", f"name: expected a string, got 1000.0; {QUOTES}"),
    ("model: 2026-1-1T0:00:00", f"a mapping, got the date 2026-01-01 00:00:00; {QUOTES}"),
    ("env: 5", f"env: expected a kind or a mapping, got 5; {QUOTES}"),
    ("env: {train: 2026-01-01}", f"from Python, got the date 2026-01-01; {QUOTES}"),
    ("env: {reward: 1.50}", f"or a list of at least one of them, got 1.5; {QUOTES}"),
    ("env: {conversation: [{role: user, content: 0x10}]}", f"expected a string, got 16; {QUOTES}"),
    ("name: 2026-02-30", 'expected a date, got 2026-02-30; for a string put it in quotes: "2026'),
    # no text
    (
        MINIMAL.encode("utf-16"),
        "line 1: expected text in UTF-8, got the byte 0xff (invalid start b",
    ),
    (b"model: m\n# caf\xe9\n", "population.yaml, line 2: expected text in UTF-8"),
    *(
        (f"{MINIMAL}name: a{c}b", f"line 3, column 8: expected text, got the character U+{code}; r")
        for c, code in {"\0": "0000", "\x1b": "001B", "\x7f": "007F", "\ufffe": "FFFE"}.items()
    ),
    (f'{MINIMAL}name: "a\\0"', "name: expected text without a null character"),
    (f'{MINIMAL}name: "a\\udc80"', "name: expected text without half a character"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_no_file_may_hold_is_refused_with_its_place(refused, text, message):
    found = refused(text)
    assert message in found
    assert len(found) < 600
    found.encode()  # it can be printed


def test_a_device_without_an_end_is_read_no_further():
    with pytest.raises(ConfigError, match="expected at most 1,048,576 bytes"):
        load("/dev/zero")


def test_what_is_written_can_be_read_again(tmp_path: Path):
    big = from_dict({**SETTINGS, "env": {"kind": "sums", "args": {"a": "x" * MAX_YAML_BYTES}}})
    with pytest.raises(ConfigError, match=r"expected at most 1,048,576 bytes .* got 1,05\d,\d\d\d"):
        to_yaml(big)


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


LOOP: list[object] = []
LOOP.append(LOOP)
FROM_PYTHON = [
    *(
        ({"args": {"a": deep(levels)}}, "at most 60 levels|nested too deeply")
        for levels in (64, 300, 5000)
    ),
    ({"args": {"a": LOOP}}, "one contains itself"),
    *(({"args": {"a": [-(10**n)]}}, "an integer of at most 20 digits") for n in (20, 5000)),
    *(
        (env, "expected text without")
        for text in ("a\0b", "a\ud800b")
        for env in (
            {"prompt": text},
            {"args": {"a": [text]}},
            {"args": {text: 1}},
            {"reward": [text]},
        )
    ),
]


@pytest.mark.parametrize(("env", "message"), FROM_PYTHON, ids=range(len(FROM_PYTHON)))
def test_python_gives_nothing_that_a_file_cannot_hold(env, message):
    for build in (from_dict, lambda settings: RunConfig(**settings)):
        with pytest.raises(ConfigError, match=message) as caught:
            build({**SETTINGS, "env": {"kind": "sums", **env}})
        str(caught.value).encode()


READ = [
    (MINIMAL + "#" * (MAX_YAML_BYTES - len(MINIMAL)), lambda c: c == from_dict(SETTINGS)),
    (b"\xef\xbb\xbf" + MINIMAL.encode(), lambda c: c == from_dict(SETTINGS)),
    *(
        (f"{MINIMAL}seed: {seed}\n", lambda c, seed=seed: c.seed == seed)
        for seed in (10**20 - 1, 1 - 10**20, 2**64)
    ),
    (f"{MINIMAL}seed: 0xFFFFFFFFFFFFFFFF", lambda c: c.seed == 0xFFFFFFFFFFFFFFFF),
    (
        'model: tiny-sums\nenv: {kind: sums, prompt: "\\ud83d\\ude00{question}"}\n',
        lambda c: c.env.prompt == "\U0001f600{question}",
    ),
    (
        "model: tiny-sums\nenv: {kind: sums, args: {low: &n 1, high: *n}}\n",
        lambda c: c.env.args == {"low": 1, "high": 1},
    ),
    (
        MINIMAL + "evolve: {hyperparameters: {lr: &r {min: 1e-4, max: 1e-2}, "
        "beta: {<<: *r, max: 0.5}}}\nalgorithm: {beta: 1e-4}\n",
        lambda c: c.evolve.hyperparameters["beta"].max == 0.5,
    ),
    (to_yaml(from_dict({**SETTINGS, "env": {"kind": "sums", "args": {"a": deep(59)}}})), bool),
]


@pytest.mark.parametrize(("text", "right"), READ, ids=range(len(READ)))
def test_what_lies_within_the_limits_is_read(tmp_path: Path, text, right):
    path = tmp_path / "population.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert right(load(path))


@pytest.mark.slow
def test_thousands_of_mistakes_are_neither_all_looked_up_nor_all_told(refused, monkeypatch):
    looked_up = []

    def nearest(name: str, choices: object) -> None:
        looked_up.append(name)

    monkeypatch.setattr(messages, "nearest", nearest)
    monkeypatch.setattr(search_space, "nearest", nearest)
    for text in (
        MINIMAL + "".join(f"key{n}: 1\n" for n in range(5000)),
        MINIMAL + "evolve: {hyperparameters: {" + ", ".join(f"k{n}: 1" for n in range(5000)) + "}}",
    ):
        head, *lines = refused(text).split("\n")
        assert head == "population.yaml: more than 100 problems"
        assert len(lines) == 100
    assert len(looked_up) <= 2 * 101
    message = refused(f"{MINIMAL}population: {{sizes: [{'9, ' * 5000}]}}")
    assert len(message) < 500


@pytest.mark.parametrize("lr", [1e-30, 1e6])
def test_an_lr_at_either_end_has_a_range(lr: float):
    space = from_dict(SETTINGS, [f"algorithm.lr={lr}"]).search_space()
    assert space["lr"].min <= lr <= space["lr"].max


def test_a_path_that_no_file_can_have():
    for path, message in (("a\0b", "not a valid file name"), ("x" * 5000, "File name too long")):
        with pytest.raises(ConfigError, match=message):
            load(path)


def test_an_override_of_thousands_of_levels(refused):
    message = refused(MINIMAL, ".".join("a" * 5000) + "=1")
    assert "is nested too deeply" in message
    assert len(message) < 500
