"""Small games of several turns, and policies that say what a test wants."""

import time

from evo_grpo.types import Completion, CompletionGroup


class Echo:
    """Says "<n>?" and what came before; a reward of 1 for each "y"; over after `turns`."""

    def __init__(self, turns=3, how="terminated"):
        self.turns, self.how, self.closed, self.seeds = turns, how, 0, []

    def reset(self, seed=None):
        self.seeds.append(seed)
        self.seed, self.asked = seed, 1
        return f"{seed}?1", {"seed": seed}

    def step(self, action):
        self.asked += 1
        over = self.asked > self.turns
        terminated, truncated = over and self.how == "terminated", over and self.how == "truncated"
        text = f"{self.seed}?{self.asked}"
        return text, float(action == "y"), terminated, truncated, {"asked": self.asked}

    def close(self):
        self.closed += 1


class Longer(Echo):
    """A reward for each character; the number of turns and how long they take follow the seed."""

    def reset(self, seed=None):
        self.turns, self.seconds = 1 + seed % 3, seed % 5 / 100
        return super().reset(seed)

    def step(self, action):
        time.sleep(self.seconds)
        text, _, terminated, truncated, info = super().step(action)
        return text, float(len(action)), terminated, truncated, info


class Endless(Echo):
    """An episode that never ends by itself."""

    def __init__(self):
        super().__init__(turns=10**9)


class Broken(Echo):
    """Raises in the given turn of episodes whose seed `fails` picks; turn 0 is the reset."""

    def __init__(self, fails=lambda seed: True, turn=1):
        super().__init__()
        self.fails, self.turn, self.error = fails, turn, OSError("no socket")

    def reset(self, seed=None):
        if self.turn == 0 and self.fails(seed):
            raise self.error
        return super().reset(seed)

    def step(self, action):
        if self.asked == self.turn and self.fails(self.seed):
            raise self.error
        return super().step(action)


class Says:
    """A sampler without a model: policy p answers turn t of episode k with `words(p, k, t)`."""

    def __init__(self, tokenizer, sizes, words=lambda policy, key, turn: "y", ended=True):
        self.tokenizer, self.group_sizes = tokenizer, sizes
        self.words, self.ended = words, ended
        self.calls = []

    def sample(self, ask):
        self.calls.append((ask.turn, [list(keys) for keys in ask.keys]))
        return [
            [
                CompletionGroup(policy, prompt, (self.said(policy, key, ask.turn),))
                for prompt, key in zip(prompts, keys, strict=True)
            ]
            for policy, (prompts, keys) in enumerate(zip(ask.prompts, ask.keys, strict=True))
        ]

    def said(self, policy, key, turn):
        return completion(self.tokenizer, self.words(policy, key, turn), ended=self.ended)


def play(env, sampler, starts):
    """All policies from the same starts to the end: the loop of a training step."""
    playing = env.begin([list(starts)] * len(sampler.group_sizes), sampler.group_sizes)
    while (ask := playing.ask()) is not None:
        playing.tell(sampler.sample(ask))
    return playing.experiences()


def completion(tokenizer, text, *, ended=True, logprob=-0.5):
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids += (tokenizer.eos_token_id,) if ended else ()
    return Completion(ids, text, (logprob,) * len(ids), ended)
