"""Ranks forked from one process that has imported training: to import it takes seconds a rank.

python tests/ranks.py RANKS SCRIPT ARGUMENTS
"""

import os
import runpy
import sys

from longctx import system

with system.libraries():
    import longctx.training.life_cycle  # noqa: F401

ranks = [0] * int(sys.argv[1])
for rank in range(len(ranks)):
    ranks[rank] = os.fork()
    if ranks[rank] == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sys.argv = sys.argv[2:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        break
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    sys.exit(any(codes))
