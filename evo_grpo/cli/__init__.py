"""The command `evo-grpo`.

Exit codes: 0 success, 1 the run failed, 2 bad input, 130 after Ctrl-C, 143 after SIGTERM.

Commands import other modules when they are called, so that `--help` and `check` do not load torch.
"""


def _leave_out_current_folder() -> None:
    """Remove the current folder from `sys.path`.

    `python -m` and an empty entry of PYTHONPATH put it first, so that a file such as yaml.py in a
    downloaded run folder would replace an installed package. Modules of the user are imported from
    the current folder later, with checks (`evo_grpo.envs.loading`).
    """
    import os
    import sys

    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return
    if os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) != here:
        sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]


def main() -> None:
    """Run the command line."""
    # `_signal`, not `signal`: importing the latter takes milliseconds, in which Ctrl-C prints a
    # traceback.
    import _signal  # pyright: ignore[reportMissingImports] -- has no types
    import sys

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    _leave_out_current_folder()
    from evo_grpo.cli import stopping

    stopping.install()
    if sys.flags.optimize > 1:
        sys.stderr.write(
            "error: Python was started with -OO or PYTHONOPTIMIZE=2, without the docstrings that "
            "transformers reads; start it with -O, or without\n"
        )
        sys.exit(2)
    try:
        from evo_grpo.cli.commands import app
        from evo_grpo.cli.output import bugs_to_exit_codes

        with bugs_to_exit_codes():
            app(prog_name="evo-grpo")
    except SystemExit as ended:
        if (ranks := sys.modules.get("evo_grpo.population.ranks.ranks")) is not None:
            ranks.end_process(ended.code if isinstance(ended.code, int) else 0)
        raise
    finally:
        stopping.leave()
