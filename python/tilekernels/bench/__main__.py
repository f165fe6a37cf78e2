"""`python -m tilekernels.bench`: the command `tilekernels bench`."""

import sys

from ..cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]], prog_name="python -m tilekernels")
