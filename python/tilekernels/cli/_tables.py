"""The look that the command's tables share."""

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["make_console", "make_table"]

# Of output that goes to a file or a pipe, where nothing needs to be folded.
_PIPE_WIDTH = 160


def make_console() -> Console:
    """A console on standard output: as wide as the terminal, or wide enough for whole lines in a pipe."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def make_table(*columns: str) -> Table:
    """An empty table that folds long cells and never cuts them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
