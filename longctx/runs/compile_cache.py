"""torch.compile's cache on disk: a run traces no backward that an earlier run has compiled.

torch 2.11 to 2.13 leave out of it autograd Functions (pytorch#149751 verified them and left the
switch off) and autocast (pytorch#191106). All our layers have them. Shapes and backwards of our
operators are no part of torch's key (pytorch#144344), so a hash of our sources is.
"""

import functools
import hashlib
from pathlib import Path

from longctx.attention import registered
from longctx.attention.description import SCORES

AUTOCAST = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")


@functools.cache
def use() -> None:
    """Save compiled code of this process to disk, and load that of earlier processes."""
    import torch._functorch.config
    import torch._inductor.compile_fx
    import torch.compiler.config

    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    known = torch._inductor.config.unsafe_marked_cacheable_functions
    torch._inductor.config.unsafe_marked_cacheable_functions = known | dict.fromkeys(AUTOCAST, "1")
    torch.compiler.config.cache_key_tag += f" longctx {traced()}"


def traced() -> str:
    """Return a hash of the files that torch.compile traces: ours, and backends of plugins."""
    folders = [Path(__file__).parents[1] / name for name in ("attention", "kernels", "model")]
    files = {path for folder in folders for path in folder.rglob("*.py")}
    files |= {path for backend in registered().values() if (path := backend.source())}
    files |= {Path(file) for *_, file in SCORES.values() if file}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:32]
