"""`python -m evo_grpo` is the command `evo-grpo`."""

from evo_grpo.cli import main

if __name__ == "__main__":
    main()
