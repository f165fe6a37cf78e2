"""`python -m tilekernels`: the command `tilekernels`, for where scripts are not on the path."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="python -m tilekernels")
