"""Dependencies between the parts point one way; each outside library is used in one place."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GROUND = {"files", "hub_snapshot", "untrusted", "tables", "python_child", "stop_signal"}
GROUND |= {"config", "runs"}
MAY_IMPORT = {
    "config": {"config"},
    "runs": GROUND,
    "planner": GROUND,
    "kernels": GROUND,
    "attention": GROUND | {"kernels"},
    "model": GROUND | {"attention", "kernels"},
    "data": GROUND,
    "distributed": GROUND | {"planner", "model", "attention"},
    "evaluation": GROUND | {"planner", "distributed", "model", "attention", "kernels", "data"},
    "generation": GROUND
    | {"planner", "distributed", "model", "attention", "kernels", "data", "evaluation"},
    # Training validates with evaluation.
    "training": GROUND
    | {"planner", "distributed", "model", "attention", "kernels", "data", "evaluation"},
    "report": GROUND,
}
MAY_IMPORT["cli"] = GROUND | MAY_IMPORT.keys()
ONLY_IN = {
    "triton": ("longctx/kernels/",),
    "lightning": ("longctx/distributed/", "longctx/training/"),
    "datasets": ("longctx/data/",),
    "tokenizers": ("longctx/data/",),
    "wandb": ("longctx/runs/wandb_process.py", "longctx/report/dashboard.py"),
    "wandb_workspaces": ("longctx/report/dashboard.py",),
    "lm_eval": ("longctx/evaluation/harness.py",),
    "huggingface_hub": ("longctx/hub_snapshot.py", "longctx/data/sources/hub.py"),
    "hydra": ("longctx/cli/composition.py",),
    "omegaconf": ("longctx/cli/composition.py",),
}
SOURCES = sorted([*ROOT.glob("longctx/**/*.py"), ROOT / "train.py", ROOT / "eval.py"])


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at the top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= (
                {f"longctx.{alias.name}" for alias in node.names}
                if node.module == "longctx"
                else {node.module}
            )
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_dependencies_point_one_way(path):
    where = str(path.relative_to(ROOT))
    part = (
        path.relative_to(ROOT).parts[1].removesuffix(".py") if where.startswith("longctx/") else ""
    )
    for name in imports(path):
        if part in MAY_IMPORT and name.startswith("longctx."):
            other = name.split(".")[1]
            assert other in {part, *MAY_IMPORT[part]}, f"{where} imports {name}"
        top = name.split(".")[0]
        assert top not in ONLY_IN or where.startswith(ONLY_IN[top]), f"{where} imports {name}"


def test_every_part_is_listed():
    folders = (p for p in (ROOT / "longctx").iterdir() if p.is_dir() and not p.is_symlink())
    parts = {p.name for p in folders if p.name != "__pycache__"}
    assert parts == set(MAY_IMPORT)


def test_training_imports_no_library_that_only_metrics_of_lightning_need() -> None:
    code = (
        "import sys, longctx.training.loop;"
        "assert not {'transformers', 'matplotlib', 'datasets', 'wandb'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
