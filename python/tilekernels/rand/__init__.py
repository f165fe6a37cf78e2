"""Random numbers: normal ones, drawn by a kernel whose state comes from torch's generator."""

from ._randn import randn as randn
from ._randn import set_seed as set_seed
from .randn_like import randn_like as randn_like
