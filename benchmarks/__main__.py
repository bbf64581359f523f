"""`python -m benchmarks NAME key=value ...`: one benchmark. `--help` lists them and their keys."""

import sys

from benchmarks.words import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
