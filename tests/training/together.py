"""Runs of several processes, one after another in the same processes, which import torch once.

    python tests/training/together.py RUNS

RUNS is JSON: for each run the port at which its processes meet, and its command line.
"""

import json
import os
import sys

import train
from longctx import system

for port, words in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = str(port)
    if code := train.main(words):
        system.exit_with(code)
system.exit_with(0)
