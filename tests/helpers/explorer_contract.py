"""What every exploration keeps. tests/evolve/test_kinds.py runs it on each of them."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.evolve.generation import changes_between
from evo_grpo.evolve.protocols import Candidate, Trial
from evo_grpo.evolve.start import sample_hparams
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

PROPERTY = settings(max_examples=40)

RANGES = {
    "lr": RLParameter(min=1e-6, max=1e-2),
    "beta": RLParameter(min=0.0, max=0.2),
    "clip_coef": RLParameter(min=0.05, max=0.5),
    "group_size": RLParameter(min=2, max=16),
    "temperature": RLParameter(min=0.5, max=1.5),
    "top_p": RLParameter(min=0.5, max=1.0),
    "top_k": RLParameter(min=0, max=50),
    "min_p": RLParameter(min=0.0, max=0.3),
    "repetition_penalty": RLParameter(min=0.8, max=1.3),
    "max_grad_norm": RLParameter(min=0.05, max=2.0),
    "update_epochs": RLParameter(min=1, max=4),
    "batch_size": RLParameter(min=4, max=64),
}
INSIDE = Hparams(lr=1e-4, beta=0.0, clip_coef=0.2, top_p=0.9, batch_size=None)


@st.composite
def candidates(draw):
    """A candidate that lies inside of its ranges, the ranges, and a seed."""
    names = draw(st.lists(st.sampled_from(sorted(RANGES)), unique=True))
    hp_config = HyperparameterConfig(**{name: RANGES[name] for name in names})
    start = INSIDE
    if draw(st.booleans()):
        start = start.with_value("clip_high", 1.28)
    hparams = sample_hparams(start, hp_config, np.random.default_rng(draw(st.integers(0, 999))))
    if draw(st.booleans()):
        hparams = hparams.with_value("batch_size", None)
    copied = draw(st.booleans())
    elite = not copied and draw(st.booleans())
    trials, round = draw(_trials(start, hp_config)), draw(st.integers(1, 4))
    twin = copied or (not elite and draw(st.booleans()))
    share = st.floats(2**-60, 1)  # a draw has 53 bits, divided by the agents
    count = (len(names) + 1) * twin
    shares = tuple(draw(st.lists(share, min_size=count, max_size=count)))
    candidate = Candidate(hparams, copied, elite, trials, round, twin, shares)
    return candidate, hp_config, draw(st.integers(0, 2**32))


@st.composite
def _trials(draw, start, hp_config):
    """What agents of earlier rounds trained with; some of them failed."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    fitness = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan]), max_size=14))
    return [
        Trial(sample_hparams(start, hp_config, rng), value, number // 4)
        for number, value in enumerate(fitness)
    ]


class ExplorerContract:
    """Subclass as `Test...` and give `explorers`, a hypothesis strategy of explorations; `beyond`
    are the hyperparameters that it changes in copies without a range, and `survivors_vary` says
    whether those without a setting `copies_only` vary survivors too.
    """

    explorers = None
    beyond = frozenset()
    survivors_vary = False

    def check(self, test):
        """Run `test(explorer, candidate, hp_config, seed)` on many cases."""
        PROPERTY(given(self.explorers, candidates())(lambda e, case: test(e, *case)))()

    def test_what_may_change_stays_in_its_range(self):
        def test(explorer, candidate, hp_config, seed):
            hparams = explorer.explore(candidate, hp_config, np.random.default_rng(seed))
            changes = changes_between(candidate.hparams, hparams, hp_config)
            expected = candidate.hparams
            for name, (old, new) in changes.items():
                assert old != new
                before = expected.get(name)
                # No batch size, which takes all rows, counts as the greatest of the range.
                assert old == (hp_config[name].max if before is None else before)
                expected = expected.with_value(name, new)
            assert hparams == expected
            assert set(changes) <= {*hp_config.names(), "clip_low", "clip_high", *self.beyond}
            for name in changes.keys() - (self.beyond - set(hp_config.names())):
                end = name in ("clip_low", "clip_high")
                bounds = hp_config["clip_coef" if end else name]
                value = abs(hparams.get(name) - 1) if end else hparams.get(name)
                assert bounds.min - 1e-12 <= value <= bounds.max + 1e-12
            low, high = hparams.clip_bounds
            assert low < high
            for name in {"group_size", "top_k", "update_epochs", "batch_size"} & changes.keys():
                assert type(hparams.get(name)) is int
            again = explorer.explore(candidate, hp_config, np.random.default_rng(seed))
            assert again == hparams, "equal streams"

        self.check(test)

    def test_nothing_changes_without_ranges(self):
        def test(explorer, candidate, hp_config, seed):
            del hp_config
            rng = np.random.default_rng(seed)
            found = explorer.explore(candidate, HyperparameterConfig(), rng)
            changes = changes_between(candidate.hparams, found, HyperparameterConfig())
            assert changes.keys() <= (self.beyond if candidate.copied else set())
            assert changes or found == candidate.hparams

        self.check(test)

    def test_the_elite_and_survivors_keep_their_values_unless_they_may_change(self):
        def test(explorer, candidate, hp_config, seed):
            survivors_stay = getattr(explorer, "copies_only", not self.survivors_vary)
            survivors_stay = survivors_stay or getattr(explorer, "step", "") == "between"
            elite_stays = survivors_stay or not getattr(
                explorer, "mutate_elite", self.survivors_vary
            )
            for elite, stays in ((True, elite_stays), (False, survivors_stay)):
                # A survivor with the values of another agent counts as a copy.
                survivor = replace(candidate, copied=False, elite=elite, twin=False, shares=())
                rng = np.random.default_rng(seed)
                found = explorer.explore(survivor, hp_config, rng)
                if stays:
                    assert found == survivor.hparams
                    unmoved = np.random.default_rng(seed).bit_generator.state
                    assert rng.bit_generator.state == unmoved

        self.check(test)

    def test_values_are_finite_after_many_rounds(self):
        def test(explorer, candidate, hp_config, seed):
            rng = np.random.default_rng(seed)
            for _ in range(20):
                hparams = explorer.explore(candidate, hp_config, rng)
                candidate = replace(candidate, hparams=hparams)
            for name in hp_config.names():
                ends = ("clip_low", "clip_high") if name == "clip_coef" else (name,)
                values = [candidate.hparams.get(end) for end in ends]
                assert all(value is None or math.isfinite(value) for value in values)

        self.check(test)
