import math

import pytest
import tiny
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from evo_grpo.rollout.sampling import RowSampling, Sampling, sample_tokens

V = 13
CPU = torch.device("cpu")


def slow_distribution(logits, sampling, seen=(), forbidden=()):
    """One row in plain Python: penalty, temperature, ban, min_p, top_k, top_p, in this order."""
    values = []
    for token, value in enumerate(logits):
        if token in seen:
            penalty = sampling.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        values.append(-math.inf if token in forbidden else value / sampling.temperature)
    top = max(values)
    weights = [math.exp(value - top) for value in values]
    kept = [t for t in range(len(weights)) if weights[t] >= sampling.min_p and weights[t] > 0]
    kept.sort(key=lambda t: -weights[t])
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    mass, nucleus = 0.0, []
    for token in kept:
        if sampling.top_p < 1 and mass >= sampling.top_p * sum(weights[t] for t in kept):
            break
        nucleus.append(token)
        mass += weights[token]
    return {token: weights[token] / mass for token in nucleus}


def sample(logits, sampling, draws, **more):
    """Every draw for one row of logits, or a row of logits per draw."""
    count = len(draws)
    table = logits.repeat(count, 1) if logits.ndim == 1 else logits.clone()
    settings = sampling if isinstance(sampling, list) else [sampling]
    rows = RowSampling.build(settings, [count // len(settings)] * len(settings), V, CPU)
    marks = {}
    for name, tokens in more.items():
        marks[name] = torch.zeros(count, V, dtype=torch.bool)
        marks[name][:, list(tokens)] = True
    return sample_tokens(table, draws, rows, **marks)


def grid(count):
    """The middles of `count` equal parts of [0, 1)."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(temperature=3.0),
    Sampling(top_k=1),
    Sampling(top_k=4),
    Sampling(top_k=V),
    Sampling(top_k=V + 100),
    Sampling(top_p=0.05),
    Sampling(top_p=0.5),
    Sampling(top_p=0.93),
    Sampling(min_p=0.1),
    Sampling(min_p=0.9),
    Sampling(repetition_penalty=1.7),
    Sampling(repetition_penalty=0.6),
    Sampling(top_k=5, top_p=0.7),
    Sampling(min_p=0.15, top_p=0.8),
    Sampling(temperature=0.8, top_k=6, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
]


class TestOneRowAgainstPlainPython:
    PARTS = 4000

    @pytest.mark.parametrize("sampling", SETTINGS, ids=str)
    @pytest.mark.parametrize(("seed", "forbidden"), [(0, ()), (1, (2, 5))])
    def test_kept_tokens_and_their_probabilities(self, sampling, seed, forbidden):
        """Inverting a distribution at a fine grid of draws gives each token its share of it."""
        logits = tiny.noise((V,), seed) * 2
        seen = (1, 2, 7)
        expected = slow_distribution(logits.tolist(), sampling, seen, forbidden)
        if sampling.repetition_penalty == 1:
            assert expected == slow_distribution(logits.tolist(), sampling, (), forbidden)
        marks = {"seen": seen} | ({"forbidden": forbidden} if forbidden else {})
        tokens, logprobs = sample(logits, sampling, grid(self.PARTS), **marks)
        shares = torch.bincount(tokens, minlength=V).double() / self.PARTS
        for token in range(V):
            assert abs(shares[token] - expected.get(token, 0.0)) <= 1.5 / self.PARTS
            if token not in expected:
                assert shares[token] == 0
        plain = torch.log_softmax(logits / sampling.temperature, dim=-1)
        torch.testing.assert_close(logprobs, plain[tokens], atol=1e-5, rtol=1e-5)

    def test_draws_invert_the_cumulative_distribution_in_token_order(self):
        logits = torch.full((V,), -math.inf)
        logits[[3, 6, 9]] = torch.log(torch.tensor([0.25, 0.5, 0.25]))
        draws = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53]).double()
        tokens, logprobs = sample(logits, Sampling(), draws)
        assert tokens.tolist() == [3, 3, 6, 6, 9, 9]
        expected = torch.tensor([0.25, 0.25, 0.5, 0.5, 0.25, 0.25])
        torch.testing.assert_close(logprobs.exp(), expected)


class TestGreedyRows:
    def test_the_likeliest_token_whatever_the_draw_and_the_filters(self):
        logits = tiny.noise((50, V), 3)
        for more in ({}, {"top_p": 0.2}, {"top_k": 3}, {"min_p": 0.9}):
            tokens, logprobs = sample(logits, Sampling(temperature=0.0, **more), grid(50))
            assert tokens.tolist() == logits.argmax(-1).tolist()
            expected = torch.log_softmax(logits, -1).amax(-1)  # of the policy, at temperature 1
            torch.testing.assert_close(logprobs, expected)

    def test_after_penalty_and_forbidden_tokens(self):
        logits = torch.arange(V).float()
        greedy = Sampling(temperature=0.0, repetition_penalty=3.0)
        tokens, _ = sample(logits, greedy, grid(1), seen=(V - 1,), forbidden=(V - 2,))
        assert tokens.tolist() == [V - 3]

    def test_weights_that_are_not_finite_show_in_the_log_prob(self):
        _, logprobs = sample(torch.full((V,), math.nan), Sampling(temperature=0.0), grid(2))
        assert logprobs.isnan().all()


class TestManyRows:
    def test_every_row_has_its_own_settings(self):
        """A batch of unlike rows samples what each of them samples alone."""
        settings = [*SETTINGS, Sampling(temperature=0.0)]
        draws = grid(7).repeat(len(settings))
        logits = tiny.noise((len(draws), V), 4) * 2
        together = sample(logits, settings, draws, seen=(1, 2, 7))
        for index, sampling in enumerate(settings):
            rows = slice(7 * index, 7 * (index + 1))
            alone = sample(logits[rows], sampling, draws[rows], seen=(1, 2, 7))
            assert torch.equal(together[0][rows], alone[0])
            torch.testing.assert_close(together[1][rows], alone[1])

    @pytest.mark.parametrize(
        ("sampling", "same"),
        [
            (Sampling(top_p=0.6), True),
            (Sampling(min_p=0.2), True),
            (Sampling(top_k=4, top_p=0.7), True),
            (Sampling(min_p=0.15, top_p=0.7), False),
            (Sampling(top_k=6, min_p=0.15, top_p=0.7), False),
        ],
    )
    def test_beside_transformers_own_filters(self, sampling, same):
        """It takes min_p last, which leaves what top_p counts larger: never fewer tokens."""
        warpers = [TopPLogitsWarper(sampling.top_p), MinPLogitsWarper(sampling.min_p)]
        if sampling.top_k:
            warpers.insert(0, TopKLogitsWarper(sampling.top_k))
        fewer = 0
        for seed in range(30):
            logits = tiny.noise((V,), seed) * 1.5
            scores = logits[None].clone()
            for warper in warpers:
                scores = warper(None, scores)
            theirs = set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())
            ours = set(sample(logits, sampling, grid(4000))[0].tolist())
            assert ours <= theirs
            fewer += ours != theirs
        assert (fewer == 0) == same


class TestEdges:
    @pytest.mark.parametrize("top_p", [5e-324, 1e-300, 1e-45, 1e-20])
    def test_a_nucleus_of_next_to_no_mass_holds_the_likeliest(self, top_p):
        logits = tiny.noise((V,), 5)
        tokens, _ = sample(logits, Sampling(top_p=top_p), grid(50))
        assert set(tokens.tolist()) == {int(logits.argmax())}
        assert int(logits.argmax()) != V - 1, "where an empty nucleus would point"

    @pytest.mark.parametrize("sampling", [Sampling(temperature=0.01), Sampling(temperature=1e-6)])
    def test_a_ban_of_the_only_likely_token(self, sampling):
        """All others have a probability of 0 in single precision, yet one of them must come."""
        logits = torch.linspace(0, 1, V)
        logits[1] = 9.0
        tokens, logprobs = sample(logits, sampling, grid(5), forbidden=(1,))
        assert set(tokens.tolist()) == {V - 1}
        assert torch.isfinite(logprobs).all()

    def test_a_row_of_nan_harms_no_other(self):
        logits = tiny.noise((3, V), 5)
        draws = grid(3)
        for sampling in (Sampling(), Sampling(top_p=0.9, top_k=4, min_p=0.1)):
            clean, _ = sample(logits, sampling, draws)
            broken = logits.clone()
            broken[1] = math.nan
            tokens, logprobs = sample(broken, sampling, draws)
            assert tokens[[0, 2]].tolist() == clean[[0, 2]].tolist()
            assert 0 <= tokens[1] < V
            assert torch.isnan(logprobs).tolist() == [False, True, False]


@pytest.mark.parametrize("vocabulary", [4096, 5000, 5119])
class TestALargeVocabulary:
    """It is searched in two steps: the block, then the token in it."""

    def test_tokens_are_those_of_one_search(self, vocabulary):
        logits = tiny.noise((200, vocabulary), 3).double() * 3
        rows = RowSampling.build([Sampling()], [200], vocabulary, CPU)
        tokens, _ = sample_tokens(logits.clone(), grid(200), rows)
        cumulative = torch.softmax(logits, -1).cumsum(-1)
        assert tokens.tolist() == torch.searchsorted(cumulative, grid(200)[:, None])[:, 0].tolist()

    def test_no_draw_takes_a_token_without_mass(self, vocabulary):
        logits = torch.full((3, vocabulary), -math.inf)
        logits[:, [300, vocabulary - 1]] = 0.0
        logits[2] = math.nan
        rows = RowSampling.build([Sampling()], [3], vocabulary, CPU)
        draws = torch.tensor([0.0, 1 - 2**-53, 0.5], dtype=torch.float64)
        tokens, _ = sample_tokens(logits, draws, rows)
        assert tokens[:2].tolist() == [300, vocabulary - 1]
        assert 0 <= tokens[2] < vocabulary


class TestRowSampling:
    def test_an_unused_setting_costs_nothing(self):
        rows = RowSampling.build([Sampling(), Sampling(temperature=0.5)], [2, 1], V, CPU)
        assert rows.temperature.flatten().tolist() == [1.0, 1.0, 0.5]
        assert (rows.top_p, rows.top_k, rows.min_p, rows.penalty, rows.minimum) == (None,) * 5
        assert rows.limit.tolist() == [32, 32, 32]

    def test_one_row_that_uses_it(self):
        settings = [
            Sampling(),
            Sampling(
                top_p=0.5,
                top_k=3,
                min_p=0.25,
                repetition_penalty=2.0,
                max_output_tokens=4,
                min_output_tokens=2,
            ),
        ]
        rows = RowSampling.build(settings, [1, 2], V, CPU)
        assert rows.top_p.flatten().tolist() == [1.0, 0.5, 0.5]
        assert rows.top_k.flatten().tolist() == [V, 3, 3]
        assert rows.min_p.flatten().tolist() == [0.0, 0.25, 0.25]
        assert rows.penalty.flatten().tolist() == [1.0, 2.0, 2.0]
        assert rows.limit.tolist() == [32, 4, 4]
        assert rows.minimum.tolist() == [0, 2, 2]
        last = rows.select(torch.tensor([2]))
        assert last.top_k.tolist() == [[3]]
        assert last.limit.tolist() == [4]
