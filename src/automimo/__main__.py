"""`python -m automimo` is the `automimo` command."""

import sys

from automimo.cli import main

if __name__ == "__main__":
    sys.exit(main())
