"""The command `evo-grpo`.

Exit codes: 0 done, 1 the run failed, 2 bad input, 130 after Ctrl-C, 143 after SIGTERM.

Commands import what they need when they are called, so that `--help` and `check` load no torch.
"""


def main() -> None:
    """Run the command line."""
    # What `signal` is made of: to load that takes milliseconds in which Ctrl-C were a traceback.
    import _signal  # pyright: ignore[reportMissingImports] -- has no types

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from evo_grpo.cli import stopping

    stopping.install()
    try:
        from evo_grpo.cli.commands import app
        from evo_grpo.cli.failures import bugs_to_exit_codes

        with bugs_to_exit_codes():
            app(prog_name="evo-grpo")
    finally:
        stopping.leave()
