"""What the tests of eval.py share: the script, its texts, tasks."""

import json
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "eval.py"
TEXTS = [f"# file {n}\n" + "a rose is a rose is a rose\n" * (n + 1) for n in range(30)]
TEXT = "a rose is a rose is a rose\nand a violet is a violet\n"
Evaluate = Callable[..., tuple[dict, str]]


def write_tasks(folder: Path) -> Path:
    """Write tasks of lm-evaluation-harness with their data: choices, whole texts, answers."""
    folder.mkdir()
    rows = [
        {"text": TEXT * n, "q": "a rose is a", "options": [" rose", " violet"], "gold": n % 2}
        for n in (1, 2, 3)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = (
        "dataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\n"
    )
    (folder / "choice.yaml").write_text(
        head + "task: my_choice\noutput_type: multiple_choice\n"
        "doc_to_text: '{{q}}'\ndoc_to_choice: '{{options}}'\n"
        "doc_to_target: gold\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )
    (folder / "rolling.yaml").write_text(
        head + "task: my_text\noutput_type: loglikelihood_rolling\n"
        "doc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n"
    )
    (folder / "answer.yaml").write_text(
        head + "task: my_answer\noutput_type: generate_until\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: rose\n"
        "generation_kwargs: {until: ['\\n'], max_gen_toks: 4, do_sample: false}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    return folder
