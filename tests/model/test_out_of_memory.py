"""A device that runs out of memory: half as much at once, the same result, a record of it."""

import json

import pytest
import torch
from small_run import Told, small

from evo_grpo import run
from evo_grpo.errors import RunFailedError
from evo_grpo.learn.learner import Learner
from evo_grpo.model.out_of_memory import halved, is_out_of_memory
from evo_grpo.rollout.native import native_engine as engine
from evo_grpo.rollout.native.native_engine import NativeEngine


def short_of_memory(monkeypatch, owner, name, most, size):
    """Let a method fail as a device does when it computes more than so much at once."""
    whole, failures = getattr(owner, name), []

    def method(self, *given, **keywords):
        if size(*given) > most:
            failures.append(size(*given))
            # After the work, when gradients and metrics have been touched.
            whole(self, *given, **keywords)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return whole(self, *given, **keywords)

    monkeypatch.setattr(owner, name, method)
    return failures


def settings(tokens=400, dropout=0.0):
    return small(
        model__lora__dropout=dropout,
        engine__max_tokens_per_microbatch=tokens,
        evolve__fitness__prompts=6,
        population__rounds=2,
    )


def outcomes(folder):
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    scores = [[a["score"]["mean"] for a in line["agents"]] for line in lines]
    losses = [[a["metrics"]["loss"] for a in line["agents"]] for line in lines]
    norms = [[a["metrics"]["grad_norm"] for a in line["agents"]] for line in lines]
    return scores, torch.tensor(losses), torch.tensor(norms), [line["reduced"] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])  # through layers of its own, and the modules
def test_a_step_is_repeated_with_smaller_micro_batches(tmp_path, monkeypatch, dropout):
    """It fails in its second micro-batch, when gradients and metrics hold the first."""
    scores, losses, norms, reduced = outcomes(run(settings(40, dropout), out=tmp_path / "whole"))
    assert reduced == [{}, {}]
    terms, budgets = Learner._loss_terms, []

    def failing(self, *given):
        budgets.append(self._tokens)
        if len(budgets) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return terms(self, *given)

    monkeypatch.setattr(Learner, "_loss_terms", failing)
    with pytest.warns(
        UserWarning, match=r"max_tokens_per_microbatch is 20 from now on \(it was 40"
    ):
        short = outcomes(run(settings(40, dropout), out=tmp_path / "short"))
    assert budgets[:2] == [40, 40]
    assert set(budgets[2:]) == {20}
    assert short[0] == scores
    torch.testing.assert_close(short[1], losses, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(short[2], norms, atol=1e-5, rtol=1e-3)
    assert short[3] == [{"max_tokens_per_microbatch": 20}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("refills", [False, True], ids=["in pieces", "refilled"])
def test_completions_are_decoded_again_in_smaller_parts(refills, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "refills_rows", lambda device: refills)
    scores, losses, norms, _ = outcomes(run(settings(), out=tmp_path / "whole"))
    failures = short_of_memory(
        monkeypatch,
        NativeEngine,
        "_rollout",
        15,
        lambda requests, places: min(
            sum(r.samples * len(r.prompts) for r in requests), places or 1024
        ),
    )
    with pytest.warns(
        UserWarning, match=r"engine.max_decode_rows is \d+ from now on \(it was 1024"
    ):
        short = outcomes(run(settings(), out=tmp_path / "short"))
    assert failures
    assert short[0] == scores
    torch.testing.assert_close(short[1], losses, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(short[2], norms, atol=1e-5, rtol=1e-3)
    assert all(0 < line["max_decode_rows"] <= 15 for line in short[3])


@pytest.mark.parametrize(
    ("owner", "name", "setting"),
    [
        (Learner, "_loss_terms", "engine.max_tokens_per_microbatch"),
        (NativeEngine, "_rollout", "engine.max_decode_rows"),
    ],
)
def test_where_nothing_can_be_smaller_the_run_ends_with_a_remedy(
    tmp_path, monkeypatch, owner, name, setting
):
    short_of_memory(monkeypatch, owner, name, 0, lambda *_: 1)
    with (
        pytest.warns(UserWarning, match="out of memory"),
        pytest.raises(RunFailedError, match=rf"{setting}: the device ran out of memory over the"),
    ):
        run(settings(), out=tmp_path / "run", observer=Told())


def test_what_torch_says_on_a_cpu_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("no"))


def test_a_bound_stays_a_multiple():
    with pytest.warns(UserWarning, match="x is 24 from now on"):
        assert halved("x", 1024, 50, MemoryError("no"), "buy more", unit=8) == 24
