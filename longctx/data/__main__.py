"""`python -m longctx.data`: what a data set holds, and how well it fills rows of a length. See
`--help`.
"""

import sys

from longctx.data.describe import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
