"""`python -m longctx.bench NAME key=value ...`: one benchmark. `--help` lists them and their keys."""

import sys

from longctx.bench.words import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
