"""Dependencies between the parts point one way; each outside library is used in one place."""

import ast
from pathlib import Path

import pytest

from tests.processes import ROOT, finished

GROUND = {"files", "hub_snapshot", "untrusted", "tables", "system"}
GROUND |= {"config", "spec", "plugins", "runs"}
PARTS = GROUND | {"planner", "parallel", "model", "attention", "kernels", "data"}
MAY_IMPORT = {
    "config": {"config", "spec"},
    "spec": {"config", "spec"},
    "runs": GROUND,
    "planner": GROUND | {"training"},
    "kernels": GROUND,
    "attention": GROUND | {"kernels"},
    "transformers": {"attention", "config", "spec", "transformers"},
    "model": GROUND | {"attention", "kernels", "transformers"},
    "data": GROUND,
    "parallel": GROUND | {"planner", "model", "attention"},
    "evaluation": PARTS | {"training"},  # its validations ask for pass keys
    "generation": PARTS | {"evaluation"},
    "training": PARTS,
    "report": GROUND,
}
MAY_IMPORT["chat"] = MAY_IMPORT["generation"] | {"generation"}
MAY_IMPORT["cli"] = GROUND | MAY_IMPORT.keys()
# What backends say of themselves: any part may ask, before torch is imported
DESCRIPTIONS = {"longctx.attention.description"}
ONLY_IN = {
    "transformers": ("longctx/transformers.py", "longctx/model/transformers_"),
    "triton": ("longctx/kernels/",),
    "lightning": ("longctx/parallel/", "longctx/training/"),
    "datasets": ("longctx/data/",),
    "tokenizers": ("longctx/data/",),
    "wandb": ("longctx/runs/wandb_copy.py", "longctx/report/dashboard.py"),
    "tensorboard": ("longctx/runs/trackers.py",),
    "mlflow": ("longctx/runs/trackers.py",),
    "trackio": ("longctx/runs/trackers.py",),
    "wandb_workspaces": ("longctx/report/dashboard.py",),
    "lm_eval": ("longctx/evaluation/harness.py",),
    "huggingface_hub": (
        *("longctx/hub_snapshot.py", "longctx/data/sources/hub.py", "longctx/model/export.py"),
    ),
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
        if part in MAY_IMPORT and name.startswith("longctx.") and name not in DESCRIPTIONS:
            other = name.split(".")[1]
            assert other in {part, *MAY_IMPORT[part]}, f"{where} imports {name}"
        top = name.split(".")[0]
        assert top not in ONLY_IN or where.startswith(ONLY_IN[top]), f"{where} imports {name}"


def test_every_part_is_listed():
    folders = (p for p in (ROOT / "longctx").iterdir() if p.is_dir() and not p.is_symlink())
    parts = {p.name for p in folders if p.name != "__pycache__"}
    assert parts == set(MAY_IMPORT) - {"chat", "generation", "transformers"}


LARGE = {"torch", "lightning", "datasets", "pyarrow", "matplotlib", "wandb"}
# What is done, one after the other in one process → the libraries that none so far has imported.
WITHOUT = {
    "import longctx; assert longctx.__version__": LARGE | {"numpy"},
    "import longctx.attention.description": LARGE | {"numpy"},
    "import longctx.planner.fitting, longctx.planner.overview": LARGE | {"numpy"},
    "import longctx.report.compare": LARGE | {"numpy"},
    "from longctx.report.dashboard import sections; sections()": LARGE,
    """from longctx.config.data_config import DataConfig
from longctx.data.sources.registry import check_overrides, read_documents
check_overrides(DataConfig(source='text', path='x', chat=True), {})""": LARGE
    | {"numpy", "tokenizers", "jinja2", "fsspec"},
    "assert next(read_documents(DataConfig())).text": LARGE,
    """from longctx.config.train_config import WandbConfig
from longctx.runs.tracking import Tracker
import pathlib, tempfile
tracker = Tracker(pathlib.Path(tempfile.mkdtemp()), WandbConfig(mode='disabled'))
tracker.log({'step': 1, 'tokens_seen': 5})
tracker.start_copies({})
tracker.finish(0)""": LARGE,
    "import longctx.attention; longctx.attention.attention": {"torch._dynamo", "lightning"},
    "import longctx.training.loop": {"datasets", "wandb"}
    | {"transformers", "matplotlib", "scipy", "torchvision"},  # which Lightning's metrics would use
}


def test_what_needs_no_large_library_imports_none(tmp_path):
    lines = ["import sys"]
    for work, absent in WITHOUT.items():
        lines += [work, f"assert not {absent} & set(sys.modules), {absent} & set(sys.modules)"]
    process = finished("-c", ["\n".join(lines)], tmp_path, TMPDIR=tmp_path)
    assert process.returncode == 0, process.stderr
