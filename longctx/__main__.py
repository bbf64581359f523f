"""`python -m longctx COMMAND key=value ...`: the same as the console script `longctx`."""

import sys

from longctx.cli import main

if __name__ == "__main__":
    sys.exit(main())
