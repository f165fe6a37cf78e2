"""The TileLang kernels: build time only, never shipped. A folder is a family, a file an operator group; see declare."""
