"""What the tests of eval.py share: the script, its texts, a task."""

import json
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "eval.py"
TEXTS = [f"# file {n}\n" + "a rose is a rose is a rose\n" * (n + 1) for n in range(30)]
Evaluate = Callable[..., tuple[dict, str]]


def write_task(folder: Path) -> None:
    """A task of lm-evaluation-harness with its data in `folder`."""
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:3])
    )
    (folder / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: bits_per_byte}]\n"
    )
