import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from text_games import Broken, Echo, Endless, completion

from evo_grpo.envs.episodes.multi_turn import TokenObservationWrapper
from evo_grpo.errors import ConfigError, DataError, PromptTooLongError, RewardError, ShapeError
from evo_grpo.learn.rows import rows_from_trajectories

#: Closes every turn with the end token, as chat models do.
CLOSING = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def wrap(tokenizer):
    def make(env=None, **settings):
        settings = {"max_turns": 5, **settings}
        return TokenObservationWrapper(env or Echo(), settings.pop("tok", tokenizer), **settings)

    return make


def split(episode):
    """The episode's ids as (sampled?, text) runs."""
    runs = []
    for token, sampled in zip(episode.token_ids, episode.mask, strict=True):
        character = episode.tokenizer.decode([token])
        if runs and runs[-1][0] == sampled:
            runs[-1][1] += character
        else:
            runs.append([sampled, character])
    return [tuple(run) for run in runs]


def by_hand(episode, text, ended=True):
    """What get_action would hand to step: prompt and completion as one (1, T) tensor."""
    said = completion(episode.tokenizer, text, ended=ended)
    return torch.tensor([[*episode.token_ids, *said.token_ids]])


def test_an_episode_by_hand(wrap):
    episode = wrap()
    observation, info = episode.reset(seed=7)
    assert info == {"seed": 7}
    assert observation["text"] == "[user]7?1[assistant]"
    assert observation["input_ids"].shape == (1, len(episode.token_ids))
    assert observation["attention_mask"].sum() == len(episode.token_ids)
    observation, reward, terminated, truncated, info = episode.step(by_hand(episode, "y"))
    assert (reward, terminated, truncated, info) == (1.0, False, False, {"asked": 2})
    assert observation["text"] == "[user]7?1[assistant]y[user]7?2[assistant]"
    episode.step(by_hand(episode, "no"))
    observation, reward, terminated, truncated, _ = episode.step(by_hand(episode, "y"))
    assert (observation, reward, terminated, truncated) == ({}, 1.0, True, False)
    assert (episode.total_reward, episode.turns, episode.end) == (2.0, 3, "terminated")


def test_only_the_policys_tokens_are_marked_and_the_end_token_is_one(wrap):
    episode = wrap()
    episode.reset(seed=7)
    for words in ("y", "no", "y"):
        episode.take_turn(completion(episode.tokenizer, words))
    assert split(episode) == [
        (False, "[user]7?1[assistant]"),
        (True, "y<eos>"),
        (False, "[user]7?2[assistant]"),
        (True, "no<eos>"),
        (False, "[user]7?3[assistant]"),
        (True, "y<eos>"),
    ]
    assert len(episode.logprobs) == sum(episode.mask)


def test_an_episode_knows_the_logprobs_of_all_its_turns_or_none(wrap):
    episode = wrap()
    episode.reset(seed=7)
    for words, told in (("y", True), ("no", False), ("y", True)):
        turn = completion(episode.tokenizer, words)
        episode.take_turn(turn if told else replace(turn, logprobs=None))
    assert episode.trajectory.logprobs is None
    (row,) = rows_from_trajectories([episode.trajectory], np.ones(1))
    assert row.sampler_logprobs is None
    episode.reset(seed=7)
    episode.take_turn(completion(episode.tokenizer, "y"))
    assert len(episode.trajectory.logprobs) == episode.trajectory.sampled > 0


def test_a_turn_that_the_template_closes_with_the_end_token_holds_it_once(wrap, make_tokenizer):
    episode = wrap(tok=make_tokenizer(CLOSING))
    episode.reset(seed=7)
    episode.take_turn(completion(episode.tokenizer, "y"))
    episode.take_turn(completion(episode.tokenizer, "cut", ended=False))
    assert split(episode) == [
        (False, "[user]7?1<eos>\n[assistant]"),
        (True, "y<eos>"),
        (False, "\n[user]7?2<eos>\n[assistant]"),
        (True, "cut"),
        # The template's end token: nobody sampled it, so nobody is trained on it.
        (False, "<eos>\n[user]7?3<eos>\n[assistant]"),
    ]


def test_sampled_tokens_are_never_encoded_again(wrap):
    # Two ids that decode to one special token and a letter, and would not come back as they are.
    episode = wrap()
    episode.reset(seed=1)
    tokens = (0, 40, 0, 1)
    said = completion(episode.tokenizer, "x")
    episode.take_turn(type(said)(tokens, "x", (-1.0,) * 4, ended=True))
    sampled = [t for t, m in zip(episode.token_ids, episode.mask, strict=True) if m]
    assert sampled == list(tokens)


@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
def test_padding_behind_a_completion_is_dropped_also_when_it_is_the_end_token(wrap, pad):
    episode = wrap()
    episode.pad_id = None if pad is None else episode.tokenizer.convert_tokens_to_ids(pad)
    episode.reset(seed=2)
    ids = by_hand(episode, "y")
    padded = torch.cat([ids, torch.full((1, 3), episode.pad_id or 0)], dim=1)
    episode.step(padded)
    assert split(episode)[1] == (True, "y<eos>")


#: Closes every turn with another token than the tokenizer's end token, as chat models do.
CLOSING_OTHERWISE = CLOSING.replace("<eos>", "<bos>")


def test_a_turn_closed_by_another_end_token_of_the_model_holds_it_once(wrap, make_tokenizer):
    episode = wrap(tok=make_tokenizer(CLOSING_OTHERWISE), end_ids=[2])
    episode.reset(seed=7)
    ids = by_hand(episode, "y", ended=False)
    # Padded with the tokenizer's end token, which ends nothing here.
    padded = torch.cat([ids, torch.tensor([[2, 1, 1]])], dim=1)
    _, reward, *_ = episode.step(padded)
    assert reward == 1.0
    assert split(episode) == [
        (False, "[user]7?1<bos>\n[assistant]"),
        (True, "y<bos>"),
        (False, "\n[user]7?2<bos>\n[assistant]"),
    ]
    assert episode.ended


def test_raw_text_is_joined_without_a_template(wrap, make_tokenizer):
    episode = wrap(tok=make_tokenizer(None), apply_chat_template=False)
    episode.reset(seed=7)
    episode.take_turn(completion(episode.tokenizer, "y"))
    assert split(episode) == [(False, "7?1"), (True, "y<eos>"), (False, "7?2")]


def test_an_opening_may_hold_more_than_the_observation(wrap):
    opening = [
        {"role": "user", "content": "Answer {observation}"},
        {"role": "assistant", "content": "I say "},
    ]
    episode = wrap(conversation_template=opening)
    assert episode.reset(seed=7)[0]["text"] == "[user]Answer 7?1[assistant]I say "
    episode.take_turn(completion(episode.tokenizer, "y"))
    assert split(episode)[2] == (False, "[user]7?2[assistant]")
    with pytest.raises(ConfigError, match=r"expected \{observation\} as its only column.*question"):
        wrap(conversation_template="{question}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('one message at most') if messages | length > 1 }}x", "one message"),
        ("{{ messages[-1]['content'] }}", "leaves out the completion"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_is_missing_or_for_one_turn_is_refused(
    wrap, make_tokenizer, template, message
):
    with pytest.raises(ConfigError, match=f"{message}.*apply_chat_template=False"):
        wrap(tok=make_tokenizer(template))


@pytest.mark.parametrize(
    ("env", "turns", "end"),
    [
        (Echo(2), 2, "terminated"),
        (Echo(2, how="truncated"), 2, "truncated"),
        (Endless(), 5, "max_turns"),
    ],
)
def test_how_an_episode_ends(wrap, env, turns, end):
    episode = wrap(env)
    episode.reset(seed=0)
    while not episode.end:
        episode.take_turn(completion(episode.tokenizer, "y"))
    assert (episode.turns, episode.end, episode.total_reward) == (turns, end, float(turns))
    # What nobody answers is not part of it.
    assert episode.mask[-1]
    assert episode.trajectory.end == end
    assert episode.trajectory.text.splitlines()[:2] == ["y", "[environment] 0?2"]
    with pytest.raises(ConfigError, match=rf"Echo|Endless.*is over \({end}\); call reset"):
        episode.take_turn(completion(episode.tokenizer, "y"))


def test_an_episode_ends_where_the_context_does(wrap):
    # "[user]0?1[assistant]" has 20 tokens, a turn of "y" adds 2 and the next question 20.
    episode = wrap(Endless(), max_turns=99, max_model_len=70, max_output_tokens=4)
    episode.reset(seed=0)
    while not episode.end:
        episode.take_turn(completion(episode.tokenizer, "y"))
    assert (episode.end, episode.turns) == ("context", 3)
    assert len(episode.token_ids) == 20 + 22 + 22 + 2
    assert episode.mask[-1]


def test_a_first_prompt_without_room_for_an_answer_is_named(wrap):
    episode = wrap(max_model_len=23, max_output_tokens=4)
    with pytest.raises(PromptTooLongError, match=r"Echo.reset.*20 tokens.*room for 4.*of 23"):
        episode.reset(seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": 0}, "max_turns and max_output_tokens: expected >= 1"),
        ({"max_output_tokens": 0}, "max_turns and max_output_tokens: expected >= 1"),
        ({"max_model_len": 8, "max_output_tokens": 8}, "more than max_output_tokens=8.*got 8"),
    ],
)
def test_numbers_out_of_range_are_refused(wrap, settings, message):
    with pytest.raises(ConfigError, match=message):
        wrap(**settings)


def test_ids_that_do_not_continue_the_observation_are_refused(wrap):
    episode = wrap()
    episode.reset(seed=0)
    with pytest.raises(
        ShapeError, match=r"the 20 ids of the observation.*got 20 ids that add none"
    ):
        episode.step([episode.token_ids])
    with pytest.raises(ShapeError, match="that begin otherwise"):
        episode.step(np.array([[5] * 30]))
    assert episode.turns == 0


class Replies(Echo):
    def __init__(self, begun=("x", {}), said=None):
        super().__init__()
        self.begun, self.said = begun, said

    def reset(self, seed=None):
        return self.begun

    def step(self, action):
        return self.said


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        (Replies("x"), DataError, r"Replies.reset: expected a tuple \(text, info\) .* got 'x'"),
        (Replies(("x", 1, {})), DataError, r"Replies.reset: expected a tuple \(text, info\)"),
        (Replies((3, {})), DataError, "Replies.reset: expected a string for the policy.* got 3"),
        (Replies(("x", [1])), DataError, r"Replies.reset: .* with a dict as info, got \('x', \[1"),
        (Replies(said=("x", 1.0)), DataError, r"Replies.step: expected a tuple \(text, reward"),
        (Replies(said=("x", "1.0", True, False, {})), RewardError, "finite reward, got '1.0'"),
        (Replies(said=("x", math.nan, True, False, {})), RewardError, "finite reward, got nan"),
        (Replies(said=("x", 1e308, True, False, {})), RewardError, "finite reward from -1e"),
        (Replies(said=(None, 0.0, False, False, {})), DataError, "for the policy.* got None"),
        (Replies(said=("x" * 3_000_000, 0.0, False, False, {})), DataError, "got 3,000,000: 'xx"),
        (Replies(said=("x", 0.0, np.zeros(2), False, {})), DataError, "terminated to be True or"),
        (Replies(said=("x", 0.0, "False", False, {})), DataError, "got 'False'; return"),
        (Replies(said=("x", 0.0, False, 2, {})), DataError, "truncated to be True .* got 2"),
        (Replies(said=("x", 0.0, False, False, 3)), DataError, "Replies.step: .* a dict as info"),
    ],
)
def test_what_an_environment_returns_is_checked(wrap, env, error, message):
    episode = wrap(env)

    def one_turn():
        episode.reset(seed=0)
        episode.take_turn(completion(episode.tokenizer, "y"))

    with pytest.raises(error, match=message):
        one_turn()


def test_the_last_text_may_be_missing_and_info_too(wrap):
    episode = wrap(Replies(begun=("x", None), said=(None, True, np.bool_(True), None, None)))
    assert episode.reset()[1] == {}
    assert episode.take_turn(completion(episode.tokenizer, "y")) == (1.0, {})


def test_an_environment_that_raises_is_seen_by_hand_and_recorded_by_drop(wrap):
    episode = wrap(Broken())
    episode.reset(seed=0)
    with pytest.raises(OSError, match="no socket") as raised:
        episode.take_turn(completion(episode.tokenizer, "y"))
    episode.drop(raised.value)
    dropped = episode.trajectory
    assert (dropped.end, dropped.error) == ("error", "OSError: no socket")
    assert (dropped.token_ids, dropped.mask, dropped.logprobs) == ((), (), ())
