"""`python -m mpistrat`, and the program `mpistrat`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
