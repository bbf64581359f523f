"""longctx: train GPTs on long documents, with pluggable exact attention."""

import os

__version__ = "0.1.0"

# By default OpenMP's threads spin for 3 ms at each barrier. If other programs need the cores, that
# takes most of a CPU's time. OpenMP reads the policy once, when torch loads.
if "GOMP_SPINCOUNT" not in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
