"""The command line of the kernels: `show key=value ...` and `tune key=value ...`."""

from __future__ import annotations

from longctx.options import answer, help_lines, read


def main(argv: list[str]) -> int:
    """Do what `argv` says; 0, or 2 after one line on stderr."""
    return answer(argv or ["help"], help_text, run)


def run(argv: list[str]) -> None:
    """The command that `argv` names; ValueError for one that does not exist."""
    from longctx.kernels import show, tune

    name, *words = argv
    commands = {"show": show, "tune": tune}
    if name not in commands:
        raise ValueError(f"{name} is not a command; choose show or tune")
    module = commands[name]
    module.run(read(module.Options, words), " ".join(["python -m longctx.kernels", *argv]))


def help_text() -> str:
    """The commands, and each key with its default and meaning."""
    from longctx.kernels import show, tune

    return "\n".join(
        [
            "The kernels of attention=flash.",
            "",
            "  python -m longctx.kernels show    what runs here, tested and written down as the lock of a run has it, as JSON",
            *help_lines(show.Options),
            "  python -m longctx.kernels tune    measure launch configs on this GPU and write the table of the best",
            *help_lines(tune.Options),
        ]
    )
