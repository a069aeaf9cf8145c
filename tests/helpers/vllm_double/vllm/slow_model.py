"""The model of a folder, row by row, token by token, with adapters added to its weights."""

import copy
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


@cache
def _loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class SlowModel:
    def __init__(self, keywords):
        self.keywords = keywords
        self.base = copy.deepcopy(_loaded(keywords["model"]))
        self.kept = copy.deepcopy(self.base.state_dict())
        self.tokenizer = None
        if not keywords["skip_tokenizer_init"]:
            self.tokenizer = AutoTokenizer.from_pretrained(keywords["tokenizer"])
        #: By id, whatever the path is later: the trap of an id that is used twice.
        self.adapted = {}
        #: By name, whatever the path is later: the trap of a name that is used twice.
        self.logits = {}
        self.caches = [torch.zeros(3)]

    @torch.no_grad()
    def sample(self, rows):
        done = [self._complete(ids, sampling, request) for ids, sampling, request in rows]
        if any(torch.isnan(torch.tensor(values)).any() for _, values, _ in done):
            # The trap: what is not finite stays in memory that others get next.
            self.caches[0].fill_(float("nan"))
            self.logits.clear()
        return [
            SimpleNamespace(
                token_ids=tokens,
                logprobs=[
                    {token: SimpleNamespace(logprob=value)}
                    for token, value in zip(tokens, values, strict=True)
                ],
                stop_reason=reason,
            )
            for tokens, values, reason in done
        ]

    def lose(self, level):
        """Forget what a sleep does not keep: the adapters on the device, at 2 the base too."""
        self.logits.clear()
        for model in [*self.adapted.values(), *([self.base] if level == 2 else [])]:
            for parameter in model.parameters():
                parameter.data.zero_()

    def reload(self):
        self.base.load_state_dict(self.kept)

    def remove(self, number):
        self.adapted.pop(number, None)

    def _complete(self, ids, sampling, request):
        generator = torch.Generator().manual_seed(sampling.seed or 0)
        tokens, values = [], []
        while len(tokens) < sampling.max_tokens:
            logits = self._logits(tuple(ids) + tuple(tokens), request) + 0 * self.caches[0].sum()
            logits = shaped(logits.clone(), sampling, list(ids), tokens)
            logprobs = torch.log_softmax(logits, -1)
            if sampling.temperature == 0:
                token = int(logits.argmax())
            elif logprobs.isnan().any():
                token = 0
            else:
                drawn = torch.rand((), generator=generator)
                below = (logprobs.exp().cumsum(-1) <= drawn).sum()
                token = min(int(below), int((logprobs > float("-inf")).nonzero()[-1]))
            tokens.append(token)
            values.append(float(logprobs[token]))
            if token in sampling.stop_token_ids:
                return tokens, values, token
            # Always a token late, as vLLM is where half a character follows the string.
            for text in sampling.stop:
                if text in self.tokenizer.decode(tokens[:-1]):
                    return tokens, values, text
        return tokens, values, None

    def _logits(self, ids, request):
        key = (None if request is None else request.lora_name, ids)
        if key not in self.logits:
            model = self.base if request is None else self._with(request)
            self.logits[key] = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        return self.logits[key]

    def _with(self, request):
        number = request.lora_int_id
        if number not in self.adapted:
            folder = Path(request.lora_path)
            config = json.loads((folder / "adapter_config.json").read_text())
            assert config["r"] <= self.keywords["max_lora_rank"]
            model = copy.deepcopy(self.base)
            state = load_file(folder / "adapter_model.safetensors")
            for key in [key for key in state if key.endswith(".lora_A.weight")]:
                module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                # vLLM copies each matrix into a slot of the adapter's one rank.
                assert state[key].shape[0] == config["r"]
                update = state[key.replace("lora_A", "lora_B")] @ state[key]
                weight = model.get_submodule(module).weight
                weight.data += update * config["lora_alpha"] / config["r"]
            self.adapted[number] = model
        return self.adapted[number]


def shaped(logits, sampling, prompt, tokens):
    """Penalties, shortest length, temperature, min_p, top_k and top_p, in vLLM's order."""
    for token in set(prompt + tokens):
        factor = sampling.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(tokens):
        logits[token] -= sampling.presence_penalty
        logits[token] -= sampling.frequency_penalty * tokens.count(token)
    if len(tokens) < sampling.min_tokens:
        logits[sampling.stop_token_ids] = float("-inf")
    if sampling.temperature == 0:
        return logits
    logits = logits / sampling.temperature
    probs = torch.softmax(logits, -1)
    logits = logits.masked_fill(probs < sampling.min_p * probs.max(), float("-inf"))
    ordered, order = torch.softmax(logits, -1).sort(descending=True, stable=True)
    dropped = torch.zeros(len(ordered), dtype=torch.bool)
    if sampling.top_k > 0:
        dropped[sampling.top_k :] = True
    dropped |= (ordered.cumsum(0) - ordered) >= sampling.top_p
    if sampling.top_p >= 1:
        dropped &= torch.arange(len(ordered)) >= (sampling.top_k or len(ordered))
    logits[order[dropped]] = float("-inf")
    return logits
