"""The gradient of every KL term against the analytic one, and the KL that learning by it leaves.

    OMP_NUM_THREADS=1 python experiments/bench/kl.py [--quick] [--out FILE]

A policy whose completions are few enough to be listed, 625 of four tokens, so that the divergence
and its gradient are sums and not estimates. The KL meant is the sum over positions of the token's
own, averaged over prefixes as sampled, which the gradient does not pass. The package gets sampled
completions with rewards of zero; its gradient is projected on the analytic gradients of both
directions and on eight random ones, and compared in standard errors.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import Report, parser, quiet
from torch import Tensor

from evo_grpo import GRPO
from evo_grpo.quickstart import GRPO as WholeModel

VOCABULARY, LENGTH, PROMPT = 5, 4, 3
ROWS = 64
"""Completions of a learn call."""
RANDOM_DIRECTIONS = 8
MOST_STANDARD_ERRORS = 4.0
CALLS, EVERY = 60, 20

POLICY_FIRST, REFERENCE_FIRST = "KL(policy || reference)", "KL(reference || policy)"
PENALTIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO, beta": (REFERENCE_FIRST, {}),
    "GRPO, kl_bias_correction": (POLICY_FIRST, {"kl_bias_correction": True}),
    "GRPO, kl_shaping": (POLICY_FIRST, {"kl_shaping": True}),
    "GSPO, kl_bias_correction": (POLICY_FIRST, {"kl_bias_correction": True, "loss_type": "gspo"}),
    "GSPO, kl_shaping": (POLICY_FIRST, {"kl_shaping": True, "loss_type": "gspo"}),
}
"""Estimator -> the divergence that it descends, and the settings that switch it on."""
QUICKSTART = "quickstart, kl_coef"


@dataclass(frozen=True)
class World:
    """A policy beside its reference, both as functions of ids (B, T).

    Attributes:
        policy: Logits (B, T, V), with gradient.
        reference: Logits (B, T, V).
        weights: What the policy trains.
    """

    policy: Callable[[Tensor], Tensor]
    reference: Callable[[Tensor], Tensor]
    weights: Sequence[Tensor]

    def kl(self, kind: str) -> Tensor:
        """Return the sum over positions of the token's KL, prefixes weighted but not passed."""
        ids = completions()
        policy = self.policy(ids)[:, :-1].log_softmax(-1)
        with torch.no_grad():
            reference = self.reference(ids)[:, :-1].log_softmax(-1)
        terms = {
            POLICY_FIRST: policy.exp() * (policy - reference),
            REFERENCE_FIRST: reference.exp() * (reference - policy),
        }
        return (probabilities(policy, ids)[:, None, None] * terms[kind]).sum()

    def gradient(self, kind: str) -> Tensor:
        """Return the analytic gradient (P,) per token, which is how the losses average."""
        return flat(torch.autograd.grad(self.kl(kind) / LENGTH, list(self.weights)))

    @torch.no_grad()
    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw prompts with completions (count, 1 + T) from the policy."""
        ids = completions()
        shares = probabilities(self.policy(ids)[:, :-1].log_softmax(-1), ids)
        return ids[torch.multinomial(shares, count, replacement=True, generator=generator)]


def completions() -> Tensor:
    """Return the prompt with every completion, (V ** T, 1 + T)."""
    tails = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * LENGTH)
    return torch.cat([torch.full((len(tails), 1), PROMPT), tails], dim=1)


def probabilities(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Return the probability of each completion, detached, from log-probs (S, T, V)."""
    return logprobs.gather(-1, ids[:, 1:, None])[..., 0].sum(-1).exp().detach()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def network(seed: int) -> Any:  # noqa: ANN401 -- of transformers
    """Return a Llama of two thousand weights, none of them small."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24},
                **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
                **{"max_position_embeddings": 16, "initializer_range": 0.5},
                **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
            )
        )


@torch.no_grad()
def move(weights: Sequence[Tensor], scale: float, seed: int) -> None:
    """Take a policy away from its reference."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.add_(torch.randn(weight.shape, generator=generator) * scale)


def agent_world(settings: dict[str, Any], lr: float) -> tuple[World, Callable[[Tensor], Tensor]]:
    """Return an agent away from its reference, and what it learns from ids (B, 1 + T).

    The second returns the gradient (P,) that reached the optimizer.
    """
    agent = GRPO(
        model=network(0), device="cpu", beta=1.0, lr=lr, update_epochs=1, max_grad_norm=None,
        group_size=ROWS, max_output_tokens=LENGTH, lora={"r": 4}, **settings,
    )  # fmt: skip
    actor, optimizer = agent.cohort.slots.peft, agent.state.optimizer
    agent.cohort.slots.activate(agent.state.adapter)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    move(weights, 0.15, seed=1)
    seen: list[Tensor] = []

    def keep(*_: object) -> None:
        seen.append(flat([weight.grad for weight in weights]))

    optimizer.register_step_pre_hook(keep)

    def reference(ids: Tensor) -> Tensor:
        with actor.disable_adapter():
            return actor(input_ids=ids).logits

    def learn(ids: Tensor) -> Tensor:
        agent.learn(([ids], [torch.ones(len(ids), LENGTH, dtype=torch.bool)], [0.0] * len(ids)))
        return seen.pop()

    return World(lambda ids: actor(input_ids=ids).logits, reference, weights), learn


def quickstart_world(lr: float) -> tuple[World, Callable[[], Tensor]]:
    """Return a whole model away from its reference, and a step, which returns its gradient."""
    model = network(0)
    reference = copy.deepcopy(model)
    weights = list(model.parameters())
    move(weights, 0.03, seed=1)
    trainer = WholeModel(
        model, reference, lambda completions, _: [0.0] * len(completions), ROWS, 1.0,
        max_new_tokens=LENGTH, max_grad_norm=1e9, optimizer=torch.optim.Adam(weights, lr=lr),
    )  # fmt: skip

    def step() -> Tensor:
        trainer.step(torch.tensor([[PROMPT]]))
        return flat([weight.grad for weight in weights])

    return World(lambda i: model(i).logits, lambda i: reference(i).logits, weights), step


def compare(world: World, step: Callable[[], Tensor], kind: str, samples: int) -> dict[str, Any]:
    """Compare sampled gradients with the analytic ones.

    Args:
        world: The policy, which the steps must leave in place.
        step: Samples and returns a gradient (P,).
        kind: What is estimated.
        samples: Steps.

    Returns:
        The gradient along the analytic one with its standard error, the analytic one's own length,
        the same of the other direction, and the largest difference in standard errors.
    """
    other = REFERENCE_FIRST if kind == POLICY_FIRST else POLICY_FIRST
    exact, wrong = world.gradient(kind), world.gradient(other)
    generator = torch.Generator().manual_seed(2)
    random = torch.randn(RANDOM_DIRECTIONS, len(exact), generator=generator)
    lines = torch.cat([exact[None], wrong[None], random])
    lines = lines / lines.norm(dim=1, keepdim=True)
    found = torch.stack([lines @ step() for _ in range(samples)]).double()
    error = found.std(0) / samples**0.5
    apart = (found.mean(0) - (lines @ exact).double()) / error
    return {
        "estimates": kind,
        "sampled": float(found.mean(0)[0]),
        "error": float(error[0]),
        "analytic": float(exact.norm()),
        "the other direction's": float(lines[0] @ wrong),
        "largest difference in errors": float(apart.abs().max()),
    }


def gradients(name: str, samples: int) -> dict[str, Any]:
    """Compare one estimator of the table with the analytic gradient, without moving its policy."""
    if name == QUICKSTART:
        world, step = quickstart_world(lr=0.0)
        return compare(world, step, REFERENCE_FIRST, samples)
    kind, settings = PENALTIES[name]
    world, learn = agent_world(settings, lr=1e-30)
    generator = torch.Generator().manual_seed(3)
    return compare(world, lambda: learn(world.sample(ROWS, generator)), kind, samples)


def descent(name: str, calls: int = CALLS, every: int = EVERY) -> list[float]:
    """Return KL(policy || reference), before and after learn calls without any reward."""
    world: World
    if name == QUICKSTART:
        world, step = quickstart_world(lr=3e-3)
    else:
        world, learn = agent_world(PENALTIES[name][1], lr=1e-2)
        generator = torch.Generator().manual_seed(4)

        def step() -> Tensor:
            return learn(world.sample(ROWS, generator))

    found = [float(world.kl(POLICY_FIRST).detach())]
    for call in range(1, calls + 1):
        step()
        if call % every == 0:
            found.append(float(world.kl(POLICY_FIRST).detach()))
    return found


def main() -> int:
    """Fill the two tables."""
    arguments = parser(__doc__ or "").parse_args()
    quiet()
    report = Report("kl", arguments)
    samples = 20 if arguments.quick else arguments.repeats or 400
    for name in (*PENALTIES, QUICKSTART):
        found = gradients(name, samples)
        report.add("Gradients per token of completions without a reward", estimator=name, **found)
        most = found["largest difference in errors"]
        report.at_most(f"{name}: sampled - analytic", most, MOST_STANDARD_ERRORS, "standard errors")
    for name in (*PENALTIES, QUICKSTART):
        found = descent(name, calls=EVERY if arguments.quick else CALLS)
        report.add(
            "KL(policy || reference), nats per completion, after learn calls without a reward",
            estimator=name, **{str(EVERY * i): value for i, value in enumerate(found)},
        )  # fmt: skip
        report.at_most(f"{name}: KL at the end over KL at first", found[-1] / found[0], 0.5)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
