"""What the tests of eval.py share: the script, its texts, tasks."""

from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "eval.py"
TEXTS = [f"# file {n}\n" + "a rose is a rose is a rose\n" * (n + 1) for n in range(30)]
TEXT = "a rose is a rose is a rose\nand a violet is a violet\n"
Evaluate = Callable[..., tuple[dict, str]]


def write_tasks(folder: Path) -> Path:
    """Write tasks of lm-evaluation-harness with their data: choices, whole texts, answers."""
    folder.mkdir()
    for file in Path(__file__).with_name("tasks").iterdir():
        (folder / file.name).write_text(file.read_text().replace("FOLDER", str(folder)))
    return folder
