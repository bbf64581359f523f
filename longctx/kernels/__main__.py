"""`python -m longctx.kernels show | tune key=value ...`: what attention=flash runs on here, and its
launch configs. `--help`.
"""

import sys

from longctx.kernels.words import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
