"""`python -m longctx COMMAND key=value ...`: the same as the console script `longctx`."""

from longctx import stop_signal

stop_signal.catch_first()

from longctx.cli import main  # noqa: E402


def run() -> None:
    """Run the command of this process's arguments, and exit."""
    stop_signal.exit_with(main())


if __name__ == "__main__":
    run()
