"""Templates of configurations, each in a folder with the files that it names.

A folder holds `population.yaml` and its further files; none of its modules is imported here.
"""

import re
import shlex
from pathlib import Path

from evo_grpo.escaping import printable

YAML = "population.yaml"
DEFAULT = "sums"
#: The purpose of each template, in one line.
TEMPLATES = {
    DEFAULT: "adds two numbers with the embedded model: the first thing to try",
    "foods": "prefers one food, with the embedded model: one prompt, many samples",
    "dataset": "your own rows and reward: 200 rows in a CSV file and a module, to replace",
    "reasoning-gym": "a generated task with exact scoring and a chat model, for a GPU",
    "multi-turn": "a game of several turns in Python of your own",
    "smollm2": "a real instruct model of 135M parameters, on a CPU",
    "vllm": "Qwen3-4B on one GPU of 24 GB, with vLLM to generate long completions",
    "slurm": "a population on several machines of a cluster, with its job script",
}


def template(name: str = DEFAULT, file: str = YAML) -> str:
    """Return the commented configuration that `evo-grpo init --template NAME FILE` writes.

    Args:
        name: A key of `TEMPLATES`.
        file: The file name that the commands in the comments use.
    """
    text = (_folder(name) / YAML).read_text(encoding="utf-8")
    shown = printable(file)  # a line break would end the comment
    return re.sub(rf"(?m)^(#.*evo-grpo \w+ ){YAML}", lambda match: match[1] + shown, text)


def companions(name: str, file: str = YAML) -> dict[str, str]:
    """Return the files that a template needs besides its configuration: name -> text.

    Args:
        name: A key of `TEMPLATES`.
        file: The file name of the configuration in a job script.
    """
    texts = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(_folder(name).iterdir())
        if path.is_file() and path.name != YAML
    }
    for script in (file_name for file_name in texts if file_name.endswith(".sbatch")):
        texts[script] = texts[script].replace(f"config={YAML}", f"config={shlex.quote(file)}")
    return texts


def _folder(name: str) -> Path:
    return Path(__file__).parent / name.replace("-", "_")
