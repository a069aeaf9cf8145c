"""The command `evo-grpo`.

Exit codes: 0 done, 1 the run failed, 2 bad input, 130 after Ctrl-C, 143 after SIGTERM.

Commands import what they need when they are called, so that `--help` and `check` load no torch.
"""


def _leave_out_current_folder() -> None:
    """Take the current folder from the places of modules.

    `python -m` and an empty entry of PYTHONPATH put it first, before a file in it can be told from
    an installed package: a run folder from somebody else may hold a yaml.py. The user's own modules
    are looked for there later, under a guard (`evo_grpo.envs.loading`).
    """
    import os
    import sys

    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return
    if os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) != here:
        sys.path[:] = [place for place in sys.path if os.path.abspath(place) != here]


def main() -> None:
    """Run the command line."""
    # What `signal` is made of: to load that takes milliseconds in which Ctrl-C were a traceback.
    import _signal  # pyright: ignore[reportMissingImports] -- has no types

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    _leave_out_current_folder()
    from evo_grpo.cli import stopping

    stopping.install()
    try:
        from evo_grpo.cli.commands import app
        from evo_grpo.cli.failures import bugs_to_exit_codes

        with bugs_to_exit_codes():
            app(prog_name="evo-grpo")
    except SystemExit as ended:
        import sys

        if (ranks := sys.modules.get("evo_grpo.population.ranks.ranks")) is not None:
            ranks.end_process(ended.code if isinstance(ended.code, int) else 0)
        raise
    finally:
        stopping.leave()
