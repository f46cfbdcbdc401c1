"""`python -m strop.cli`: the program, for an interpreter whose scripts are not on PATH."""

import sys

from strop.cli.program import main

if __name__ == "__main__":
    sys.exit(main())
