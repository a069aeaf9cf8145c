"""One architecture against plain transformers and PEFT, one agent and one row at a time."""

import copy
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny_configs import KINDS, NOT_BUILT, OTHER_INPUTS, VOCABULARY, tiny_configs
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from evo_grpo.errors import EvoGrpoError, PromptTooLongError, ShapeError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.choice import open_forward
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.lora.configs import module_of
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.types import Prompt

BOUND = 1e-5
TEMPERATURE = 0.8
RANKS = {"a0": 4, "a1": 2}
#: Prompt lengths of a batch, and tokens that are decoded: rows outgrow a window of six.
PROMPTS = {"unequal": (3, 7, 5), "equal": (5, 5, 5)}
OUTPUT = 8
#: Where two logits are nearer than this, either token is the greedy one.
TIE = 1e-4


#: Standard deviation of weights that are smaller by default.
SIZE = 0.08


class CannotBuildError(Exception):
    """The tiny model does not run in plain transformers."""


@dataclass
class Result:
    """What one architecture showed.

    Attributes:
        verdict: exact, refused, wrong, late or "cannot build".
        sentence: Why, where it is not exact.
        errors: Largest error by what was compared.
        notes: What was said at construction.
        prompts: In which batches prompts are decoded.
        targets: How many linear layers default adapters go into, of how many.
    """

    verdict: str = "exact"
    sentence: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    prompts: str = ""
    targets: str = ""

    def compare(self, what: str, error: float, bound: float = BOUND) -> None:
        """Keep an error, and call the architecture wrong where it is too large."""
        self.errors[what] = max(error, self.errors.get(what, 0.0))
        if not error <= bound and self.verdict == "exact":
            self.verdict, self.sentence = "wrong", f"{what}: {error:.2g}"


def check(model_type: str) -> Result:
    """Build a tiny model and compare everything that agents do with it.

    Recurrences round more than other layers. What is just above the bound is measured again in
    double precision, where a difference that is none of rounding would stay as it is.
    """
    result = _checked(model_type)
    largest = max(result.errors.values(), default=0.0)
    if result.verdict != "wrong" or largest > 10 * BOUND:
        return result
    torch.set_default_dtype(torch.float64)
    try:
        again = _checked(model_type)
    except CannotBuildError:  # a part of it knows no double precision
        return result
    finally:
        torch.set_default_dtype(torch.float32)
    if again.verdict == "exact" and max(again.errors.values()) < BOUND / 10:
        again.notes.append(f"{largest:.1e} in single precision")
        return again
    return result


def _checked(model_type: str) -> Result:
    result = Result()
    model = build(model_type)
    attention: list[str] = []
    for adapters in ("default", "attention"):
        targets: str | list[str] = "all-linear" if adapters == "default" else attention
        if not targets:
            continue
        own = copy.deepcopy(model)
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                slots = population(own, targets)
                engine = NativeEngine(slots)
        except EvoGrpoError as error:
            result.verdict, result.sentence = "refused", str(error)
            return result
        attention = attention_layers(slots)
        result.notes += [str(w.message) for w in said if str(w.message).startswith("model ")]
        try:
            _compare(result, adapters, model, slots, engine)
        except Exception as error:  # whatever it is, it came after construction
            result.verdict = "late"
            trace = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(trace.filename).name}:{trace.lineno}"
            result.sentence = f"{adapters} adapters: {type(error).__name__}: {error} ({where})"
            return result
    return result


def build(model_type: str) -> Any:
    """Return the tiny model of an architecture, or say why there is none.

    Raises:
        CannotBuildError: None of the configurations runs in plain transformers.
    """
    problems: list[str] = []
    for make in tiny_configs(model_type):
        try:
            config = make()
            torch.manual_seed(0)
            model = _model_of(model_type, config).eval()
            _widen(model)
            if model_type not in OTHER_INPUTS:
                with torch.no_grad():
                    logits = model(input_ids=torch.arange(3, 15)[None]).logits
                if not bool(logits.isfinite().all()):
                    raise ValueError("logits are not finite")
        except Exception as error:  # of any model's own construction
            problems.append(f"{type(error).__name__}: {error}")
            continue
        model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=2, eos_token_id=1)
        return model
    reason = [NOT_BUILT[model_type]] if model_type in NOT_BUILT else []
    raise CannotBuildError("; ".join(dict.fromkeys([*reason, *problems])))


def _model_of(model_type: str, config: PreTrainedConfig) -> Any:
    if model_type not in KINDS:
        return AutoModelForCausalLM.from_config(config)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return getattr(transformers, name)._from_config(config)


def _widen(model: nn.Module) -> None:
    """Give weights a size at which a wrong token, position or adapter shows."""
    with torch.no_grad():
        for module in model.modules():
            for key, parameter in module.named_parameters(recurse=False):
                plain = isinstance(module, nn.Linear | nn.Embedding | Conv1D)
                if (plain and key == "weight") or (parameter.ndim == 3 and "conv" not in key):
                    std = float(parameter.std())
                    if std < SIZE:
                        parameter.copy_(torch.randn_like(parameter) * SIZE)
                elif key == "bias" and plain:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)


def attention_layers(slots: AdapterSlots) -> list[str]:
    """Return those of the adapted layers that are inside of attention."""
    names = [module_of(key) for key in slots.layers]
    return [
        n for n in names if "attn" in n.rpartition(".")[0] or "attention" in n.rpartition(".")[0]
    ]


def population(model: Any, targets: str | list[str]) -> AdapterSlots:
    """Return two agents of different rank, far from the base and from each other."""
    slots = AdapterSlots(SharedBase(model, None, type(model).__name__), _lora(4, targets))
    for name, rank in RANKS.items():
        slots.add(name, _lora(rank, targets))
        with torch.no_grad():
            for index, parameter in enumerate(slots.parameters(name)):
                generator = torch.Generator().manual_seed(7919 * rank + index)
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(draw * 0.3 / parameter.shape[-1] ** 0.5)
    return slots


def _lora(rank: int, targets: str | list[str]) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")


def _compare(
    result: Result, adapters: str, model: Any, slots: AdapterSlots, engine: NativeEngine
) -> None:
    reference = plain_reference(copy.deepcopy(model), slots)
    if adapters == "default":
        result.prompts = "any lengths" if engine.mixes_lengths else "equal lengths"
        result.targets = f"{len(slots.layers)} of {len(slots.base.linear_inputs)}"
        if slots.base.row_limit.selection is not None:
            _refuses_beyond(slots, engine, slots.base.row_limit.selection)
            result.notes.append(f"rows of up to {slots.base.row_limit.selection} tokens")
    for checkpointing in (False, True):
        how = "checkpointed" if checkpointing else "plain"
        logprobs, gradients = _learn(slots, reference, checkpointing=checkpointing)
        result.compare(f"forward, {adapters}, {how}", logprobs)
        result.compare(f"gradients, {adapters}, {how}", gradients)
    for prompts, lengths in PROMPTS.items():
        for greedy in (False, True) if adapters == "default" else (True,):
            gap, wrong = _sample(slots, engine, reference, lengths, greedy=greedy)
            result.compare(f"recorded log-probs, {adapters}, {prompts}", gap)
            if greedy:
                result.compare(f"greedy tokens, {adapters}, {prompts}", float(wrong), 0.0)


def _refuses_beyond(slots: AdapterSlots, engine: NativeEngine, longest: int) -> None:
    """See that no row is sampled or learned in which sparse attention would choose tokens."""
    prompt = Prompt(0, "", tuple(rows_of((longest,), 3)[0].tolist()))
    asked = RolloutRequest(0, "a0", [prompt], 1, Sampling(max_output_tokens=1), 1)
    for what, ask in (
        ("sampled", lambda: engine.rollout([asked])),
        ("learned", lambda: slots.base.row_limit.check(longest + 1)),
    ):
        try:
            ask()
        except (PromptTooLongError, ShapeError):
            continue
        raise AssertionError(f"a row of {longest + 1} tokens, where some are left out, is {what}")


def plain_reference(model: Any, slots: AdapterSlots) -> Any:
    """Return a PeftModel of its own with the same adapters."""
    names = [module_of(key) for key in slots.layers]
    reference: Any = None
    for name, rank in RANKS.items():
        if reference is None:
            reference = get_peft_model(model, _lora(rank, names), adapter_name=name)
        else:
            reference.add_adapter(name, _lora(rank, names))
    own = dict(slots.peft.named_parameters())
    with torch.no_grad():
        for key, parameter in reference.named_parameters():
            if ".lora_" in key:
                parameter.copy_(own[key])
    return reference.eval()


def rows_of(lengths: tuple[int, ...], seed: int) -> list[Tensor]:
    """Return rows of drawn tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in lengths]


def _learn(slots: AdapterSlots, reference: Any, *, checkpointing: bool) -> tuple[float, float]:
    """Return the largest error of log-probs and of gradients of one learn pass."""
    rows = rows_of((11, 6, 9), seed=5)
    layout = RowLayout(tuple(RANKS), (2, 1))
    owners = ["a0", "a0", "a1"]
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    where, targets = [], []
    for line, row in enumerate(rows):
        ids[line, : len(row)] = row
        where += [line * width + t for t in range(len(row) - 1)]
        targets += row[1:].tolist()
    weights = torch.randn(len(where), generator=torch.Generator().manual_seed(9)) / len(where)
    state = torch.get_rng_state()
    forward = open_forward(slots, tuple(RANKS), recompute=checkpointing)
    with forward.rows(layout):
        hidden = forward.hidden_at(ids, torch.tensor(where))
        temperature = torch.full((len(where),), TEMPERATURE)
        logprobs, _ = slots.base.token_logprobs(hidden, torch.tensor(targets), temperature)
        (logprobs * weights).sum().backward()
    forward.collect_gradients()
    if not torch.equal(state, torch.get_rng_state()):
        raise AssertionError("the learn pass drew from the global generator")
    ours = {name: _taken(slots.parameters(name)) for name in RANKS}
    expected, grads = [], {}
    start = 0
    for name in RANKS:
        reference.set_adapter(name)
        parameters = _ordered(reference, slots, name)
        for parameter in parameters:
            parameter.requires_grad_(True)
        for owner, row in zip(owners, rows, strict=True):
            if owner != name:
                continue
            own = scores(reference, row)
            (own * weights[start : start + len(own)]).sum().backward()
            start += len(own)
            expected.append(own.detach())
        grads[name] = _taken(parameters)
    gap = relative_gap(logprobs.detach(), torch.cat(expected))
    return gap, max(_gradient_gap(ours[name], grads[name]) for name in RANKS)


def relative_gap(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, as a share of the largest value where that is above 1."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1.0))


def _ordered(reference: Any, slots: AdapterSlots, name: str) -> list[nn.Parameter]:
    theirs = dict(reference.named_parameters())
    own = {id(p): key for key, p in slots.peft.named_parameters()}
    return [theirs[own[id(p)]] for p in slots.parameters(name)]


def _taken(parameters: list[nn.Parameter]) -> list[Tensor | None]:
    out = [None if p.grad is None else p.grad.clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return out


def _gradient_gap(ours: list[Tensor | None], theirs: list[Tensor | None]) -> float:
    largest = max([1.0, *(float(g.abs().max()) for g in theirs if g is not None)])
    gap = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        if mine is None and other is None:
            continue
        zero = torch.zeros(())
        gap = max(
            gap,
            float(
                ((zero if mine is None else mine) - (zero if other is None else other)).abs().max()
            ),
        )
    if not any(g is not None and float(g.abs().max()) > 0 for g in theirs):
        raise AssertionError("the reference has no gradient to compare with")
    return gap / largest


def scores(reference: Any, row: Tensor) -> Tensor:
    """Return the log-probs (T - 1,) of one row's tokens, by the model's own forward alone."""
    logits = reference(input_ids=row[None]).logits[0, :-1].float()
    table = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    return table.gather(1, row[1:, None])[:, 0]


def _sample(
    slots: AdapterSlots,
    engine: NativeEngine,
    reference: Any,
    lengths: tuple[int, ...],
    *,
    greedy: bool,
) -> tuple[float, int]:
    """Return the largest error of a recorded log-prob, and how many greedy rows differ."""
    asked = [Prompt(i, "", tuple(row.tolist())) for i, row in enumerate(rows_of(lengths, 21))]
    sampling = Sampling(temperature=TEMPERATURE, top_k=1 if greedy else 0, max_output_tokens=OUTPUT)
    requests = [
        RolloutRequest(i, name, asked, 1 if greedy else 2, sampling, 40 + i)
        for i, name in enumerate(RANKS)
    ]
    gap, wrong = 0.0, 0
    for request, groups in zip(requests, engine.rollout(requests), strict=True):
        reference.set_adapter(request.adapter)
        for prompt, completion in _completions(groups):
            row = torch.tensor([*prompt.token_ids, *completion.token_ids])
            with torch.no_grad():
                expected = scores(reference, row)[len(prompt.token_ids) - 1 :]
            recorded = torch.tensor(completion.logprobs)
            gap = max(gap, relative_gap(recorded, expected))
            if greedy:
                wrong += _differs(reference, prompt.token_ids, completion.token_ids)
    return gap, wrong


def _completions(groups: Any) -> Iterator[tuple[Prompt, Any]]:
    for group in groups:
        for completion in group.completions:
            yield group.prompt, completion


def _differs(reference: Any, prompt: tuple[int, ...], ours: tuple[int, ...]) -> int:
    ids = torch.tensor([prompt])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = reference.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=OUTPUT,
        )[0, len(prompt) :].tolist()
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            row = torch.tensor([[*prompt, *ours[:place]]])
            with torch.no_grad():
                logits = reference(input_ids=row).logits[0, -1]
            return int(float((logits[mine] - logits[other]).abs()) > TIE)
    return int(len(ours) != len(theirs))
