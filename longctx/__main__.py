"""`python -m longctx COMMAND key=value ...`: the same as the console script `longctx`."""

from longctx import system

system.catch_first()

from longctx.cli import main  # noqa: E402


def run() -> None:
    """Run the command of this process's arguments, and exit."""
    system.exit_with(main())


if __name__ == "__main__":
    run()
