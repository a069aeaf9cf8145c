"""Converts a plan into one JSON document, for `evo-grpo check --json`."""

from __future__ import annotations

from typing import Any

from evo_grpo.cli.plan.plan import Plan


def plan_document(plan: Plan, source: str) -> dict[str, Any]:
    """Return a plan as plain values; tokens are upper bounds, sizes bytes, unknown ones None."""
    fit = plan.fit
    return {
        "file": source,
        "config": plan.config.model_dump(mode="json"),
        "task": plan.task,
        "rows": plan.rows,
        "prompt_tokens": None if plan.prompts is None else plan.prompts._asdict(),
        "first_prompt": None if plan.first is None else plan.first._asdict(),
        "reward_calls": list(plan.calls),
        "places": list(plan.places),
        "decisions": list(plan.decisions),
        "rows_per_step": plan.rows_per_step,
        "tokens": {
            "a_round": plan.tokens_per_round,
            "evaluations": list(plan.evaluation_tokens),
            "final_comparison": plan.final_tokens,
            "test": plan.test_tokens,
            "run": plan.total_tokens,
        },
        "base": {
            "name": plan.base.name,
            "architecture": plan.base.architecture,
            "parameters": plan.base.parameters,
            "context": plan.base.context,
            "bytes": plan.base_bytes,
        },
        "adapter_parameters": plan.adapter_parameters,
        "bytes_per_agent": plan.bytes_per_agent,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "memory": [
            {
                "dtype": memory.dtype,
                "peak": memory.peak,
                "parts": {part.name: part.bytes for part in memory.parts},
            }
            for memory in plan.memory
        ],
        "fit": fit
        and {
            "place": fit.setup.place,
            "bytes": fit.setup.capacity,
            "fits": fit.fits,
            "chosen": dict(fit.chosen),
            "proposal": fit.proposal and dict(fit.proposal.changes),
        },
        "warnings": list(plan.warnings),
    }
