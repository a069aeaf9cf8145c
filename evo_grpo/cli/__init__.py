"""The command `evo-grpo`. Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted.

Commands import what they need when they are called, so that `--help` and `check` load no torch.
"""


def main() -> None:
    """Run the command line."""
    from evo_grpo.cli.commands import app

    app(prog_name="evo-grpo")
