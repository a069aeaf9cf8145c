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


# --- how much ------------------------------------------------------------------------------------


def test_a_file_of_more_than_a_mebibyte(refused):
    message = refused("#" * (MAX_YAML_BYTES + 1))
    assert message.startswith("population.yaml: expected at most 1,048,576 bytes of YAML, got more")
    assert "env.train" in message


def test_a_file_of_a_mebibyte_is_read(tmp_path: Path):
    path = tmp_path / "population.yaml"
    path.write_text(MINIMAL + "#" * (MAX_YAML_BYTES - len(MINIMAL)))
    assert load(path) == from_dict(SETTINGS)


def test_a_device_without_an_end_is_read_no_further():
    with pytest.raises(ConfigError, match="expected at most 1,048,576 bytes"):
        load("/dev/zero")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "{a: " * 20_000, "- " * 20_000],
    ids=["lists", "mappings", "dashes"],
)
def test_lists_and_mappings_that_lie_too_deep_within_each_other(refused, text: str):
    assert refused(text).startswith("population.yaml: expected YAML, but its lists and mappings")


@pytest.mark.parametrize("text", ["env: &a [*a]", "&a {model: [[*a]]}"])
def test_an_anchor_that_contains_itself(refused, text: str):
    assert "expected plain values, but one contains itself" in refused(text)


def test_aliases_are_written_out(tmp_path: Path):
    path = tmp_path / "population.yaml"
    path.write_text(
        "model: tiny-sums\nenv: {kind: sums, args: {low: &n 1, high: *n}}\n"
        "evolve: {hyperparameters: {lr: &r {min: 1e-4, max: 1e-2}, beta: {<<: *r, max: 0.5}}}\n"
        "algorithm: {beta: 1e-4}\n"
    )
    config = load(path)
    assert config.env.args == {"low": 1, "high": 1}
    assert config.evolve.hyperparameters["beta"].max == 0.5


def test_what_is_written_can_be_read_again(tmp_path: Path):
    big = from_dict({**SETTINGS, "env": {"kind": "sums", "args": {"a": "x" * MAX_YAML_BYTES}}})
    with pytest.raises(ConfigError, match=r"expected at most 1,048,576 bytes .* got 1,05\d,\d\d\d"):
        to_yaml(big)


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", [64, 300, 5000])
def test_python_gives_nothing_deeper_than_a_file_holds(levels: int):
    for build in (from_dict, lambda settings: RunConfig(**settings)):
        with pytest.raises(ConfigError, match=r"at most 60 levels|nested too deeply"):
            build({**SETTINGS, "env": {"kind": "sums", "args": {"a": deep(levels)}}})
    assert to_yaml(from_dict({**SETTINGS, "env": {"kind": "sums", "args": {"a": deep(59)}}}))


def test_python_gives_nothing_that_contains_itself():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="one contains itself"):
        RunConfig(model="tiny-sums", env={"kind": "sums", "args": {"a": loop}})


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "population.size=9999999999",
            "population.size: expected at most 10,000, got 9999999999; lower",
        ),
        ("population.rounds=100001", "population.rounds: expected at most 100,000, got 100001"),
        ("population.steps_per_round=10000000", "expected at most 1,000,000, got 10000000"),
        ("evolve.fitness.racing=1e308", "evolve.fitness.racing: expected a number in [0, 100]"),
    ],
)
def test_counts_that_no_plan_can_list(refused, override: str, message: str):
    assert message in refused(MINIMAL, override)


@pytest.mark.parametrize("lr", [1e-30, 1e6])
def test_an_lr_at_either_end_has_a_range(lr: float):
    space = from_dict(SETTINGS, [f"algorithm.lr={lr}"]).search_space()
    assert space["lr"].min <= lr <= space["lr"].max


# --- numbers and dates ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("digits", "expected"),
    [(21, "seed: expected an integer of at most 20 digits, got 1111"),
     (5000, "line 3, column 7: expected an integer, got 1111")],
)  # fmt: skip
def test_an_integer_of_more_than_20_digits(refused, digits: int, expected: str):
    message = refused(f"{MINIMAL}seed: {'1' * digits}")
    assert expected in message
    assert len(message) < 300


@pytest.mark.parametrize("number", ["0x" + "f" * 17, "-0b" + "1" * 67, "1" + ":59" * 12])
def test_an_integer_counts_by_its_value(refused, number: str):
    assert "expected an integer of at most 20 digits" in refused(f"{MINIMAL}seed: {number}")


@pytest.mark.parametrize("seed", [10**20 - 1, 1 - 10**20, 2**64, 0xFFFFFFFFFFFFFFFF])
def test_twenty_digits_are_read_and_written(tmp_path: Path, seed: int):
    path = tmp_path / "population.yaml"
    path.write_text(to_yaml(from_dict({**SETTINGS, "seed": seed})))
    assert load(path).seed == seed


@pytest.mark.parametrize("digits", [20, 5000])
def test_python_gives_no_integer_that_a_file_cannot_hold(digits: int):
    number = -(10**digits)
    for settings in ({"seed": number}, {"env": {"kind": "sums", "args": {"a": [number]}}}):
        with pytest.raises(ConfigError, match="an integer of at most 20 digits"):
            from_dict({**SETTINGS, **settings})


QUOTES = "put a string in quotes"


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("name: 2026-01-01", "name", "expected a string, got the date 2026-01-01"),
        ("name: 012", "name", "expected a string, got 10"),
        ("name: yes", "name", "expected a string, got true"),
        ("name: 1e3", "name", "expected a string, got 1000.0"),
        ("model: 2026-1-1T0:00:00", "model", "expected a name or a mapping, got the date "
         "2026-01-01 00:00:00"),
        ("env: 5", "env", "expected a kind or a mapping, got 5"),
        ("env: {train: 2026-01-01}", "env.train", "expected the name of a file, a "
         "dataset of the Hub, or rows from Python, got the date 2026-01-01"),
        ("env: {reward: 1.50}", "env.reward", "expected a function as a string, a mapping with "
         "kind model or judge, or a list of at least one of them, got 1.5"),
        ("env: {conversation: [{role: user, content: 0x10}]}", "env.conversation[0].content",
         "expected a string, got 16"),
    ],
)  # fmt: skip
def test_a_string_that_yaml_reads_as_something_else_is_to_be_quoted(
    refused, text: str, path: str, expected: str
):
    assert f"{path}: {expected}; {QUOTES}" in refused(text)


def test_a_date_that_no_calendar_has_is_to_be_quoted(refused):
    assert refused("name: 2026-02-30") == (
        "population.yaml, line 1, column 7: expected a date, got 2026-02-30; for a string "
        'put it in quotes: "2026-02-30"'
    )


def test_quotes_are_no_remedy_where_a_number_is_wrong(refused):
    assert "quotes" not in refused(f"{MINIMAL}population: {{size: 0}}")
    assert "quotes" not in refused(f"{MINIMAL}name: null")
    assert "quotes" not in refused("model: {name: m, lora: {rank_pattern: 5}}\nenv: sums")


@pytest.mark.parametrize(
    "value",
    ["!!int abc", '!!int ""', "!!int [1]", "!!bool maybe", "!!float x", "!!timestamp x", "0b_",
     "0x_", "!!map 5", "!!map [1]", "!!seq 5", "!!set {a}", "!!binary aGk=", "!!omap [a: 1]",
     "!mine 1", "{[a]: 1}", "1" + ":59" * 200 + ".5"],
)  # fmt: skip
def test_a_tag_that_does_not_fit_is_named_with_its_place(refused, value: str):
    assert refused(f"env: sums\nmodel: {value}").startswith("population.yaml, line 2, column ")


def test_two_documents_are_one_too_many(refused):
    message = refused("--- a\n--- b")
    assert message == "population.yaml, line 2, column 1: expected YAML, but found another document"


# --- what is no text -----------------------------------------------------------------------------


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path):
    path = tmp_path / "population.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load(path) == from_dict(SETTINGS)


def test_a_file_in_utf_16_is_to_be_saved_as_utf_8(refused):
    assert refused(MINIMAL.encode("utf-16")) == (
        "population.yaml, line 1: expected text in UTF-8, got the byte 0xff (invalid start byte); "
        "save the file as UTF-8"
    )
    assert refused(b"model: m\n# caf\xe9\n").startswith("population.yaml, line 2: expected text")


@pytest.mark.parametrize("character", ["\0", "\x1b", "\x7f", "￾"])
def test_a_control_character_is_named_with_its_place(refused, character: str):
    assert refused(f"{MINIMAL}name: a{character}b") == (
        f"population.yaml, line 3, column 8: expected text, got the character "
        f"U+{ord(character):04X}; remove it"
    )


@pytest.mark.parametrize(
    ("escape", "expected"),
    [("\\0", "text without a null character"), ("\\udc80", "text without half a character")],
)
def test_an_escape_that_spells_no_text(refused, escape: str, expected: str):
    message = refused(f'{MINIMAL}name: "a{escape}"')
    assert f"name: expected {expected}" in message
    message.encode()  # it can be printed


def test_two_halves_are_one_character(tmp_path: Path):
    path = tmp_path / "population.yaml"
    path.write_text('model: tiny-sums\nenv: {kind: sums, prompt: "\\ud83d\\ude00{question}"}\n')
    assert load(path).env.prompt == "\U0001f600{question}"


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"], ids=ascii)
def test_python_gives_no_text_that_a_file_cannot_hold(text: str):
    for env in ({"prompt": text}, {"args": {"a": [text]}}, {"args": {text: 1}}, {"reward": [text]}):
        with pytest.raises(ConfigError, match="expected text without") as caught:
            from_dict({**SETTINGS, "env": {"kind": "sums", **env}})
        str(caught.value).encode()


def test_a_path_that_no_file_can_have():
    for path, message in (("a\0b", "not a valid file name"), ("x" * 5000, "File name too long")):
        with pytest.raises(ConfigError, match=message):
            load(path)


def test_an_override_of_thousands_of_levels(refused):
    message = refused(MINIMAL, ".".join("a" * 5000) + "=1")
    assert "is nested too deeply" in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.lr=1e308", "algorithm.lr: expected a number from 1e-30 to 1e+06, which float"),
        ("algorithm.temperature=1e-40", "algorithm.temperature: expected a number from 1e-06 to"),
        (
            "algorithm.adv_clip_range=1e-40",
            "adv_clip_range: expected a number from 1e-06 to",
        ),
        (
            "algorithm.adv_clip_range=1e300",
            "adv_clip_range: expected a number from 1e-06 to",
        ),
        ("algorithm.delta=1e300", "algorithm.delta: expected a number from 1 to 1e+30, which"),
        ("algorithm.sapo_temperature_pos=1e-40", "sapo_temperature_pos: expected a number from"),
        ("algorithm.sampler_ratio_cap=1e-40", "sampler_ratio_cap: expected a number >= 1e-06"),
        ("algorithm.vespo_negative=[1e300, 1]", "vespo_negative: expected two finite numbers from"),
        ("evolve.fitness.temperature=1e-40", "evolve.fitness.temperature: expected a number from"),
        (
            "evolve.hyperparameters.temperature={min: 1e-40, max: 1}",
            "evolve.hyperparameters.temperature.min: expected a number from 1e-06 to 1e+06",
        ),
        ("model.lora.alpha=1e-40", "model.lora.alpha: expected a number from 1e-06 to 1e+06"),
    ],
)
def test_numbers_that_float32_turns_into_nothing_or_everything(refused, override: str, message):
    assert message in refused(MINIMAL.replace("tiny-sums", "{name: tiny-sums}"), override)
