"""The commands of `evo-grpo`, with their arguments, calls and output."""

# `--help` lists the commands in the order of these imports.
# isort: off
from evo_grpo.cli.commands import configure as configure
from evo_grpo.cli.commands import install as install
from evo_grpo.cli.commands import train as train
from evo_grpo.cli.commands import results as results
from evo_grpo.cli.commands import winner as winner
from evo_grpo.cli.commands.options import app
# isort: on

__all__ = ["app"]
