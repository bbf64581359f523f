"""`python -m longctx.report compare PATH... | watch PATH`; `--help` says more."""

import sys

from longctx.report.words import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
