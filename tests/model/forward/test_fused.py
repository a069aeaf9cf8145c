import math

import pytest
import tiny
import torch
from fused_cases import (
    T,
    assert_close,
    fused_gradients,
    inputs,
    one_at_a_time,
)

from evo_grpo.errors import ShapeError
from evo_grpo.model.forward.fused import RowLayout, population_forward
from evo_grpo.seeding import derive


@pytest.mark.parametrize("counts", [(2, 2), (1, 3)])
@pytest.mark.parametrize("build", [tiny.gpt2, tiny.qwen2, tiny.mistral])
def test_other_architectures_have_the_gradients_of_one_agent_at_a_time(build, counts):
    slots, layout = tiny.population(build(), (4, 2)), RowLayout(("a0", "a1"), counts)
    input_ids, weights = inputs(layout.rows)
    slow_hidden, slow = one_at_a_time(slots, layout, input_ids, weights)
    hidden, fast = fused_gradients(slots, layout, input_ids, weights)
    torch.testing.assert_close(hidden, slow_hidden, atol=1e-5, rtol=1e-5)
    assert_close(fast, slow)


def test_two_layouts_may_name_one_adapter_twice(pair):
    input_ids, weights = inputs(4)
    once = RowLayout(("a0", "a1"), (2, 2))
    twice = RowLayout(("a0", "a0", "a1"), (1, 1, 2))
    _, expected = fused_gradients(pair, once, input_ids, weights)
    _, got = fused_gradients(pair, twice, input_ids, weights)
    assert_close(got, expected)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 2, 3), (3, 0, 2)])
def test_none_takes_the_base_alone(counts, frozen):
    slots = tiny.population(tiny.llama())
    layout = RowLayout(("a0", None, "a1"), counts)
    input_ids, _ = inputs(layout.rows)
    with torch.no_grad():
        with population_forward(slots.layers, layout, frozen=frozen):
            hidden = slots.base.hidden(input_ids)
        with slots.peft.disable_adapter():
            plain = slots.base.hidden(input_ids)
    slots.restore_trainable()
    rows = list(layout.slices())
    torch.testing.assert_close(hidden[rows[1]], plain[rows[1]], atol=1e-5, rtol=1e-5)
    assert (hidden[rows[0]] - plain[rows[0]]).abs().max() > 1e-2
    with torch.no_grad(), population_forward(slots.layers, RowLayout((None,), (layout.rows,))):
        assert torch.equal(slots.base.hidden(input_ids), plain)


@pytest.mark.parametrize("counts", [(2, 2, 2), (3, 1, 2)], ids=["equal", "ragged"])
def test_one_agents_nan_reaches_no_other_in_a_rollout(counts):
    slots = tiny.population(tiny.llama(), (4, 4, 2))
    layout = RowLayout(tiny.names(3), counts)
    input_ids, _ = inputs(layout.rows)
    hidden = []
    for value in (None, math.nan):
        if value is not None:  # in the agent whose first row is what others are padded with
            for parameter in slots.parameters("a0"):
                parameter.data.fill_(value)
        with torch.no_grad(), population_forward(slots.layers, layout, frozen=True):
            hidden.append(slots.base.hidden(input_ids))
    assert torch.isnan(hidden[1][: counts[0]]).all()
    assert torch.equal(hidden[0][counts[0] :], hidden[1][counts[0] :])


class TestFrozen:
    @pytest.mark.parametrize("counts", [(2, 2, 2), (1, 3, 2), (0, 3, 2), (2, 0, 0)])
    def test_equals_the_path_that_learns(self, counts):
        slots = tiny.population(tiny.llama(), (4, 2, 8))
        layout = RowLayout(tiny.names(3), counts)
        input_ids, _ = inputs(layout.rows)
        out = []
        for frozen in (True, False):
            with torch.no_grad(), population_forward(slots.layers, layout, frozen=frozen):
                out.append(slots.base.hidden(input_ids))
        torch.testing.assert_close(*out, atol=1e-5, rtol=1e-5)

    def test_agents_leave_and_rows_change(self):
        slots = tiny.population(tiny.llama(), (4, 2, 8))
        input_ids, _ = inputs(6)
        layouts = [
            RowLayout(("a0", "a1", "a2"), (2, 2, 2)),
            RowLayout(("a0", "a1", "a2"), (1, 3, 2)),
            RowLayout(("a0", "a2"), (4, 2)),
            RowLayout(("a0", "a2"), (3, 3)),
            RowLayout(("a2",), (6,)),
        ]
        with torch.no_grad():
            expected = []
            for layout in layouts:
                with population_forward(slots.layers, layout):
                    expected.append(slots.base.hidden(input_ids))
            with population_forward(slots.layers, layouts[0], frozen=True) as fused:
                for layout, want in zip(layouts, expected, strict=True):
                    fused.set_layout(layout)
                    got = slots.base.hidden(input_ids)
                    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)

    def test_stacks_are_built_once(self, pair):
        layout = RowLayout(("a0", "a1"), (1, 1))
        input_ids, _ = inputs(2)
        with torch.no_grad(), population_forward(pair.layers, layout, frozen=True) as fused:
            pair.base.hidden(input_ids)
            name = next(iter(pair.layers))
            first = fused.stack(name, torch.float32)
            pair.base.hidden(input_ids)
            assert fused.stack(name, torch.float32) is first


def streams(seed, layout):
    """Seeds of LoRA dropout by the adapter and the position among its rows."""
    pairs = zip(layout.adapters, layout.counts, strict=True)
    return tuple(derive(seed, str(name), row) for name, count in pairs for row in range(count))


class TestDropout:
    RATE = 0.5

    def population(self, ranks=(4, 4, 4)):
        return tiny.population(tiny.llama(), ranks, lora_dropout=self.RATE)

    def hidden(self, slots, layout, input_ids, seed):
        dropout = streams(seed, layout)
        with torch.no_grad(), population_forward(slots.layers, layout, dropout=dropout):
            return slots.base.hidden(input_ids)

    def test_acts_and_follows_its_seed(self, generator_state):
        slots = self.population()
        layout = RowLayout(tiny.names(3), (2, 2, 2))
        input_ids, _ = inputs(6)
        first = self.hidden(slots, layout, input_ids, 5)
        assert torch.equal(first, self.hidden(slots, layout, input_ids, 5))
        assert not torch.allclose(first, self.hidden(slots, layout, input_ids, 6), atol=1e-3)
        with torch.no_grad(), population_forward(slots.layers, layout):
            assert not torch.allclose(first, slots.base.hidden(input_ids), atol=1e-3)

    @pytest.mark.parametrize("company", [("a0", "a1"), ("a0", "a2", "a1"), ("a1", "a2")])
    def test_masks_depend_on_the_row_alone(self, company):
        """Not on other agents, nor on padding; two equal rows have masks of their own."""
        slots = self.population()
        one = tiny.ids(1, T, seed=3)
        alone = self.hidden(slots, RowLayout(("a1",), (2,)), one.repeat(2, 1), 5)
        assert not torch.allclose(alone[0], alone[1], atol=1e-3)
        counts = tuple(2 if name == "a1" else 3 for name in company)
        layout = RowLayout(company, counts)
        rows = list(layout.slices())[company.index("a1")]
        everyone = tiny.ids(layout.rows, T, 9)
        everyone[rows] = one
        padded = torch.nn.functional.pad(everyone, (0, 6))
        among = self.hidden(slots, layout, padded, 5)[rows, :T]
        torch.testing.assert_close(among, alone, atol=1e-5, rtol=1e-5)

    def test_agents_may_differ_in_rate_and_have_no_rows(self):
        slots = tiny.population(tiny.llama(), (4,))
        for name in ("a1", "a2"):
            slots.add(name, tiny.lora(4, lora_dropout=0.9))
            tiny.stir(slots, name, 2)
        layout = RowLayout(("a0", None, "a2", "a1"), (1, 1, 0, 1))
        input_ids, _ = inputs(3)
        with torch.no_grad(), population_forward(slots.layers, layout):
            without = slots.base.hidden(input_ids)
        dropped = self.hidden(slots, layout, input_ids, 5)
        torch.testing.assert_close(dropped[:2], without[:2], atol=1e-6, rtol=1e-6)
        assert not torch.allclose(dropped[2], without[2], atol=1e-3)

    def test_keeps_the_mean(self):
        """Many masks average to the forward without dropout, on a layer where that is linear."""
        slots = self.population((4, 4))
        name, layer = next((n, m) for n, m in slots.layers.items() if n.endswith("q_proj"))
        x = tiny.noise((2, 3, tiny.HIDDEN), 1)
        layout = RowLayout(("a0", "a1"), (1, 1))
        with torch.no_grad():
            with population_forward({name: layer}, layout):
                exact = layer(x)
            draws = []
            for seed in range(400):
                with population_forward({name: layer}, layout, dropout=streams(seed, layout)):
                    draws.append(layer(x))
        stacked = torch.stack(draws)
        error = (stacked.mean(0) - exact).abs() / (stacked.std(0) / 20 + 1e-6)
        assert error.max() < 5

    @pytest.mark.parametrize("counts", [(2, 2, 2), (3, 1, 2)])
    def test_recomputing_draws_the_same_masks(self, counts):
        slots = self.population()
        layout = RowLayout(tiny.names(3), counts)
        dropout = streams(5, layout)
        input_ids, weights = inputs(6)
        _, plain = fused_gradients(slots, layout, input_ids, weights, dropout=dropout)
        _, again = fused_gradients(
            slots, layout, input_ids, weights, dropout=dropout, recompute=True
        )
        assert_close(again, plain, atol=1e-6)


class TestRestoring:
    def test_peft_gets_its_forward_back(self, pair):
        input_ids, weights = inputs(2)
        pair.activate("a1")
        before = pair.base.hidden(input_ids).detach()
        fused_gradients(pair, RowLayout(("a0", "a1"), (1, 1)), input_ids, weights, recompute=True)
        assert not any("forward" in vars(layer) for layer in pair.layers.values())
        assert torch.equal(pair.base.hidden(input_ids), before)

    def test_also_after_an_error(self, pair):
        with (
            pytest.raises(ShapeError, match=r"expected B=5 rows for counts=\(2, 3\), got x of sh"),
            population_forward(pair.layers, RowLayout(("a0", "a1"), (2, 3))),
        ):
            pair.base.hidden(tiny.ids(4, T))
        assert not any("forward" in vars(layer) for layer in pair.layers.values())


@pytest.mark.parametrize("counts", [(2, 2), (1, 3)])
def test_bfloat16_base_with_float32_adapters(counts):
    slots = tiny.population(tiny.llama().to(torch.bfloat16), (4, 2))
    assert {p.dtype for p in slots.parameters("a0")} == {torch.float32}
    layout = RowLayout(("a0", "a1"), counts)
    input_ids, weights = inputs(4)
    slow_hidden, slow = one_at_a_time(slots, layout, input_ids, weights)
    hidden, fast = fused_gradients(slots, layout, input_ids, weights)
    with torch.no_grad(), population_forward(slots.layers, layout, frozen=True):
        rollout = slots.base.hidden(input_ids)
    assert hidden.dtype == torch.bfloat16
    # PEFT multiplies in fp32 and rounds once, the fused forward multiplies in bf16: 8 bits each.
    torch.testing.assert_close(hidden, slow_hidden, atol=0.1, rtol=0.1)
    torch.testing.assert_close(rollout, hidden, atol=0.1, rtol=0.1)
    for name, ours in fast.items():
        assert {g.dtype for g in ours} == {torch.float32}
        flat, reference = (torch.cat([g.flatten() for g in gs]) for gs in (ours, slow[name]))
        assert torch.cosine_similarity(flat, reference, dim=0) > 0.999


def test_slices_of_a_layout_cover_the_rows_in_order():
    layout = RowLayout(("a", "b", "c"), (2, 0, 3))
    assert list(layout.slices()) == [slice(0, 2), slice(2, 2), slice(2, 5)]
    assert layout.rows == 5
