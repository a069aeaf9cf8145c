"""Stop strings and tokens: completions are those without stops, cut where one row alone is cut."""

from copy import deepcopy

import pytest
import tiny
from stop_cases import check, slots_of, tokenizer_of

from evo_grpo.errors import ConfigError
from evo_grpo.model.ends import StopRules
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings
from evo_grpo.types import Prompt


def test_completions_are_cut_where_one_row_alone_is_cut(monkeypatch):
    assert sum(check(seed, monkeypatch) for seed in range(20)) > 25


@pytest.mark.slow
def test_completions_are_cut_where_one_row_alone_is_cut_in_500_configurations(monkeypatch):
    assert sum(check(seed, monkeypatch) for seed in range(20, 520)) > 600


def test_a_string_that_ends_in_a_long_token_or_a_character_of_many_is_found():
    tokenizer = deepcopy(tokenizer_of("bytes"))
    tokenizer.add_tokens(["-" * 64])
    base = tiny.population(tiny.llama(vocab_size=len(tokenizer)), (4,), tokenizer).base

    def ends(stop, least=0):
        return StopRules(
            base, AgentSettings(algorithm={"stop": [stop], "min_output_tokens": least}).algorithm
        )

    ids = tokenizer("It is so. The final answer:\n" + "-" * 64 + "7")["input_ids"]
    place = ids.index(tokenizer.convert_tokens_to_ids("-" * 64)) + 1
    found = ends("The final answer:\n---")
    assert [found.stops(ids[:n]) for n in range(1, place + 1)] == [False] * (place - 1) + [True]
    assert found.texts([ids[:place]]) == [("It is so. ", True)]
    ids = tokenizer("\u8a9ea")["input_ids"]  # three tokens and one
    for least in range(4):
        found = ends("\u8a9e", least)
        stopped = [found.stops(ids[:n]) for n in range(1, len(ids) + 1)]
        assert stopped == [False, False, least < 3, False]


def test_a_row_is_cut_behind_the_token_with_the_end_of_its_stop_string():
    tokenizer = tokenizer_of("bytes")
    every = range(len(tokenizer))
    # Letters and the first byte of a character, which vLLM does not show before the last one.
    token = next(i for i in every if tokenizer.decode([i]) == "na\ufffd")
    row = (token, *tokenizer("x y a")["input_ids"])
    base = slots_of("bytes").base
    for least, kept in ((0, 1), (1, len(row))):
        algorithm = {"stop": ["a"], "min_output_tokens": least}
        ends = StopRules(base, AgentSettings(algorithm=algorithm).algorithm)
        assert ends.cut(row) == row[:kept]
        assert ends.cut(row[1:3]) == row[1:3]


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (["a", "x</s>"], r"stop\[1\]: expected a string of the text, got 'x</s>'.*give its id 1"),
        (["<|end|>"], "<.end.> is a special token, .*give its id 2"),
        ([10**6], "expected a token below"),
    ],
)
def test_a_stop_that_no_completion_can_have_is_refused(stop, message):
    slots = slots_of("bytes")
    with pytest.raises(ConfigError, match=message):
        NativeEngine(slots, AgentSettings(algorithm={"stop": stop}))


def test_strings_need_a_tokenizer_and_tokens_do_not():
    slots = tiny.population(tiny.llama())
    with pytest.raises(ConfigError, match="expected a base with a tokenizer for the string 'a'"):
        NativeEngine(slots, AgentSettings(algorithm={"stop": ["a"]}))
    tokens = list(range(tiny.VOCABULARY))
    engine = NativeEngine(slots, AgentSettings(algorithm={"stop": tokens}))
    request = RolloutRequest(0, "a0", [Prompt(0, "", (3, 4))], 2, Sampling(), 0)
    ((group,),) = engine.rollout([request])
    assert [(len(one.token_ids), one.ended) for one in group.completions] == [(1, True)] * 2
