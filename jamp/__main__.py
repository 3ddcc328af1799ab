"""`python -m jamp`: the command line."""

import sys

from jamp._cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
