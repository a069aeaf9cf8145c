"""The Python code of a model card; it runs as printed, without this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.asking import asking
from evo_grpo.envs.conversations import MESSAGES
from evo_grpo.envs.prompts import Template
from evo_grpo.errors import EvoGrpoError
from evo_grpo.schema.hparams import Hparams
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS
from evo_grpo.settings.env import EnvConfig

if TYPE_CHECKING:
    from evo_grpo.after.export.contents import BaseModel, Contents

PLACEHOLDER = "..."
"""Placeholder for a value that the user has to fill in."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for max_lora_rank."""


@dataclass(frozen=True)
class Use:
    """The values of the code that uses an export.

    Attributes:
        base: The base model.
        contents: The files of the export.
        template: The template of a prompt.
        row: An example row, which fills the columns of the template.
        tokens: The greatest number of tokens of an answer in the run.
        temperature: The temperature of the run's evaluations.
        pushed: The repository on the Hub, None if the export is not pushed.
        hidden: Number of the user's rows in the template that "..." stands for.
    """

    base: BaseModel
    contents: Contents
    template: Template
    row: Mapping[str, Any]
    tokens: int
    temperature: float
    pushed: str | None = None
    hidden: int = 0

    @classmethod
    def of(
        cls,
        base: BaseModel,
        contents: Contents,
        config: Mapping[str, Any],
        pushed: str | None = None,
        own: Hparams | None = None,
    ) -> Use:
        """Return the values from the settings of the run, with defaults for missing ones.

        `own` are the hyperparameters of the agent, which may have a prompt of `env.prompts` and a
        longest completion of its own.
        """
        own = own or Hparams()
        template, example = Template.of("{prompt}"), dict[str, Any]()
        tokens: int | None = None
        hidden = 0
        try:
            env, seed = EnvConfig.model_validate(config.get("env")), int(config.get("seed", 0))
            found = asking(env, seed, own.prompt, show_rows=False)
            template, example, tokens = found.template, dict(found.example), found.max_output_tokens
            hidden = found.hidden
        # The task does not exist any more, or was a Python object.
        except (EvoGrpoError, ValueError, TypeError):
            pass
        said = own.max_output_tokens or _setting(config, "algorithm", "max_output_tokens")
        temperature = _setting(config, "evolve", "fitness", "temperature")
        return cls(
            base,
            contents,
            template,
            {name: example.get(name, PLACEHOLDER) for name in template.columns()},
            said if isinstance(said, int) else tokens or DEFAULT_OUTPUT_TOKENS,
            temperature if isinstance(temperature, int | float) else 1.0,
            pushed,
            hidden,
        )


def transformers_snippet(use: Use) -> str:
    """Return code that loads an export with transformers and PEFT and answers a prompt."""
    auto = "AutoPeftModelForCausalLM" if use.contents.dtype is None else "AutoModelForCausalLM"
    imports = ["from transformers import AutoTokenizer"]
    if use.contents.dtype is None:
        imports.insert(0, f"from peft import {auto}")
    else:
        imports = [f"from transformers import {auto}, AutoTokenizer"]
    code = ", trust_remote_code=True" if use.base.own_code else ""
    place = "." if use.contents.tokenizer else use.base.reference
    return "\n".join(
        [
            *_beginning(use, imports),
            f'model = {auto}.from_pretrained("."{code})',
            f"tokenizer = AutoTokenizer.from_pretrained({_literal(place)}{code})",
            *_asked(use),
            *_inputs(use),
            "output = model.generate(",
            f"    **inputs, max_new_tokens={use.tokens}, {_decoding(use)}",
            ")",
            'answer = output[0, inputs["input_ids"].shape[1] :]',
            "print(tokenizer.decode(answer, skip_special_tokens=True))",
        ]
    )


def vllm_snippet(use: Use) -> str:
    """Return code that loads an export with vLLM and answers a prompt."""
    merged = use.contents.dtype is not None
    imports = ["from vllm import LLM, SamplingParams"]
    given = ['"."' if merged else _literal(use.base.reference)]
    # Without a dtype vLLM rounds float32 weights to 16 bits.
    given.append(f"dtype={_literal(use.contents.dtype or use.base.dtype)}")
    if use.base.own_code:
        given.append("trust_remote_code=True")
    call = "messages" if use.template.conversation is not None else "prompt"
    last = f"{call}, sampling"
    if not merged:
        imports.append("from vllm.lora.request import LoRARequest")
        rank = next((one for one in VLLM_RANKS if one >= use.contents.rank), use.contents.rank)
        given += ["enable_lora=True", f"max_lora_rank={rank}"]
        if use.base.revision is not None:
            given.append(f"revision={_literal(use.base.revision)}")
        last += ', lora_request=LoRARequest("adapter", 1, ".")'
    if use.template.conversation is not None and _continues(use):
        last += ", add_generation_prompt=False, continue_final_message=True"
    if use.template.keywords:
        last += f", chat_template_kwargs={dict(use.template.keywords)!r}"
    method = "chat" if use.template.conversation is not None else "generate"
    lines = [
        f"llm = LLM({', '.join(given)})",
        f"sampling = SamplingParams(max_tokens={use.tokens}, temperature={use.temperature})",
        *_asked(use),
        f"answers = llm.{method}({last})",
        "print(answers[0].outputs[0].text)",
    ]
    # vLLM starts processes that import this file again.
    return "\n".join(
        [*_beginning(use, imports), 'if __name__ == "__main__":', *(f"    {x}" for x in lines)]
    )


def _beginning(use: Use, imports: list[str]) -> list[str]:
    """Return the imports, and for a repository of the Hub its download."""
    if use.pushed is None:
        return [*imports, ""]
    return [
        "import os",
        "",
        "from huggingface_hub import snapshot_download",
        *imports,
        "",
        f"os.chdir(snapshot_download({_literal(use.pushed)}))",
    ]


def _asked(use: Use) -> list[str]:
    """Return the row and the prompt, or the messages, that it becomes."""
    row = ", ".join(
        f"{_literal(name)}: {_literal(value) if isinstance(value, str) else repr(value)}"
        for name, value in _row(use).items()
    )
    lines = [f"row = {{{row}}}"] if row else []
    if use.template.conversation is None:
        return [*lines, f"prompt = {_filled(use.template.text or '', use)}"]
    messages = ", ".join(_message(message, use) for message in use.template.conversation)
    return [*lines, f"messages = [{messages}]"]


def _message(message: Mapping[str, str], use: Use) -> str:
    role, content = message["role"], message["content"]
    if role == MESSAGES:
        return f"*row[{_literal(content[1:-1])}]"
    return f'{{"role": {_literal(role)}, "content": {_filled(content, use)}}}'


def _inputs(use: Use) -> list[str]:
    if use.template.conversation is None:
        return ['inputs = tokenizer(prompt, return_tensors="pt")']
    how = "continue_final_message" if _continues(use) else "add_generation_prompt"
    return [
        "inputs = tokenizer.apply_chat_template(",
        f'    messages, {how}=True{_keywords(use)}, return_dict=True, return_tensors="pt"',
        ")",
    ]


def _decoding(use: Use) -> str:
    if not use.temperature:
        return "do_sample=False"
    return f"do_sample=True, temperature={use.temperature}, top_k=0"


def _keywords(use: Use) -> str:
    """Return the keyword arguments of the chat template; it reads no names but these."""
    named = use.template.keywords.items()
    return "".join(f", {name}={value!r}" for name, value in named if name.isidentifier())


def _continues(use: Use) -> bool:
    conversation = use.template.conversation
    return conversation is not None and conversation[-1]["role"] == "assistant"


def _filled(text: str, use: Use) -> str:
    named = Template(text=text).columns()
    if named:
        return f"{_literal(text)}.format(**row)"
    return _literal(text.replace("{{", "{").replace("}}", "}"))


def _row(use: Use) -> dict[str, Any]:
    """Return values with which the template can be filled, plain ones that Python can print."""
    row: dict[str, Any] = {}
    chats = use.template.conversations
    for name, value in use.row.items():
        fits = type(value) in (str, int, float, bool)
        asked = [{"role": "user", "content": PLACEHOLDER}]
        row[name] = asked if name in chats else value if fits else PLACEHOLDER
    try:
        use.template.plain(row)
    except EvoGrpoError:  # a format such as {answer:03d}, which takes a number
        row = {name: 0 if value == PLACEHOLDER else value for name, value in row.items()}
    return row


def _literal(text: str) -> str:
    """Return a string as a Python literal, in double quotes if possible."""
    written = repr(text)
    return f'"{written[1:-1]}"' if written[0] == "'" and '"' not in written else written


def _setting(config: Mapping[str, Any], *path: str) -> object:
    value: object = config
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None  # pyright: ignore[reportUnknownMemberType] -- parsed JSON
    return value
