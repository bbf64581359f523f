"""Dependencies between the parts point one way; each outside library is used in one place."""

import ast
import functools
from pathlib import Path

from tests.processes import ROOT, finished

# A core one reads downward: a file imports its own layer and those before it
LAYERS = (
    {"files", "hub_snapshot", "system", "tables", "untrusted"},
    {"config", "spec"},
    {"kernels"},
    {"attention"},
    {"runs", "plugins"},
    {"data"},
    {"model"},
    {"parallel"},
    {"training"},
)
# Nothing of the core imports these, and of them only cli imports another
SATELLITES = {"cli", "evaluation", "generation", "hf", "planner", "report"}
ENTRANCES = {"__init__", "__main__"}
# Torch-free descriptions stand beside what they describe; any part may ask them
DESCRIPTIONS = {"attention/description.py", "model/mixers/description.py"}
PLAN = "planner/__init__.py"  # whose one question training and evaluation ask
# The imports that break the rules today. The list only gets shorter.
EXCEPTIONS = {
    "evaluation/evaluate.py → planner/plans.py",
    "generation.py → evaluation/load.py",
    "training/dry_run.py → planner/fitting.py",
    "training/dry_run.py → planner/peak_memory.py",
    "training/memory.py → planner/plans.py",
}
ONLY_IN = {
    "transformers": ("longctx/transformers.py", "longctx/hf/transformers_"),
    "triton": ("longctx/kernels/",),
    "lightning": ("longctx/parallel/", "longctx/training/"),
    "datasets": ("longctx/data/",),
    "tokenizers": ("longctx/data/",),
    "wandb": ("longctx/runs/wandb_copy.py", "longctx/report/dashboard.py"),
    "wandb_workspaces": ("longctx/report/dashboard.py",),
    "tensorboard": ("longctx/runs/trackers.py",),
    "mlflow": ("longctx/runs/trackers.py",),
    "trackio": ("longctx/runs/trackers.py",),
    "lm_eval": ("longctx/evaluation/harness.py",),
    "huggingface_hub": (
        *("longctx/hub_snapshot.py", "longctx/data/sources/hub.py", "longctx/hf/family_folder.py"),
    ),
}
SOURCES = sorted([*ROOT.glob("longctx/**/*.py"), ROOT / "train.py", ROOT / "eval.py"])


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, at the top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module.startswith("longctx")
                else {node.module}
            )
    return names


def test_a_library_is_used_in_one_place():
    for path in SOURCES:
        where, names = str(path.relative_to(ROOT)), {x.split(".")[0] for x in imports(path)}
        for name in names & ONLY_IN.keys():
            assert where.startswith(ONLY_IN[name]), f"{where} imports {name}"


def graph() -> dict[str, set[str]]:
    """Return file → the files of the package that it imports anywhere, also for types."""
    package = ROOT / "longctx"
    files = {str(path.relative_to(package)) for path in package.glob("**/*.py")}
    found: dict[str, set[str]] = {file: set() for file in files}
    for file in files:
        for name in imports(package / file):
            if name.startswith("longctx."):
                path = name.replace(".", "/").removeprefix("longctx/")
                # What a name is imported from, unless it is a file itself
                stems = (path, path.rpartition("/")[0])
                ends = [f"{stem}{end}" for stem in stems for end in (".py", "/__init__.py")]
                found[file].add(next((end for end in ends if end in files), "__init__.py"))
    return {file: others - {file} for file, others in found.items()}


def part_of(file: str) -> str:
    # Users import a part of hf by a name of its own
    return {"transformers.py": "hf"}.get(file, file.partition("/")[0].removesuffix(".py"))


def is_allowed(file: str, other: str) -> bool:
    """Return True if `file` may import `other`."""
    own, of = part_of(file), part_of(other)
    if own == of or own in {"cli", *ENTRANCES} or other in {*DESCRIPTIONS, "__init__.py"}:
        return True
    if own in SATELLITES or of in SATELLITES:
        asks_plan = other == PLAN and own in ("training", "evaluation")
        return asks_plan or (own in SATELLITES and of not in SATELLITES)
    (mine,), (its,) = ([n for n, parts in enumerate(LAYERS) if x in parts] for x in (own, of))
    return its <= mine


def test_the_core_imports_downward_and_no_satellite():
    edges = {(file, other) for file, others in graph().items() for other in others}
    assert {f"{a} → {b}" for a, b in edges if not is_allowed(a, b)} == EXCEPTIONS


def test_no_files_import_each_other():
    left = graph()
    while free := {file for file, others in left.items() if not others & left.keys()}:
        left = {file: others for file, others in left.items() if file not in free}
    assert not left


LARGE = {"torch", "lightning", "datasets", "pyarrow", "matplotlib", "wandb"}
# What is done, one after the other in one process → the libraries that none so far has imported.
WITHOUT = {
    "import longctx; assert longctx.__version__": LARGE | {"numpy"},
    "import longctx.attention.description": LARGE | {"numpy"},
    "import longctx.planner.fitting, longctx.planner.overview": LARGE | {"numpy"},
    "import longctx.report.compare": LARGE | {"numpy"},
    """from longctx.config.data_config import DataConfig
from longctx.data.sources.registry import check, read_documents
check(DataConfig(source='text', path='x', chat=True))""": LARGE
    | {"numpy", "tokenizers", "jinja2", "fsspec"},
    "assert next(read_documents(DataConfig())).text": LARGE,
    """from longctx.config.train_config import WandbConfig
from longctx.runs.tracking import Tracker
import pathlib, tempfile
tracker = Tracker(pathlib.Path(tempfile.mkdtemp()), WandbConfig(mode='disabled'))
tracker.log({'step': 1, 'tokens_seen': 5})
tracker.start_copies({})
tracker.finish(0)""": LARGE,
    "from longctx.attention import attention; from longctx.model import GPT": {
        *("torch._dynamo", "lightning")
    },
    "import longctx.training.loop": {"datasets", "wandb"}
    | {"transformers", "matplotlib", "scipy", "torchvision"},  # which Lightning's metrics would use
}


def test_what_needs_no_large_library_imports_none(tmp_path):
    lines = ["import sys"]
    for work, absent in WITHOUT.items():
        lines += [work, f"assert not {absent} & set(sys.modules), {absent} & set(sys.modules)"]
    process = finished("-c", ["\n".join(lines)], tmp_path, TMPDIR=tmp_path)
    assert process.returncode == 0, process.stderr
