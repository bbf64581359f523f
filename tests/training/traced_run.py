"""A training run whose compiled blocks are traced and differentiated by torch.compile, but run as
they are: no C++ is generated, which takes most of a minute.

python tests/training/traced_run.py compile=true devices=2 key=value ...
"""

import functools
import sys

import torch

from longctx import cli

if __name__ == "__main__":
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    sys.exit(cli.main(["train", *sys.argv[1:]]))
