"""The instrument behind `tilekernels bench`: what a call costs, against what, and how close that is to the limit.

cases: which calls. limits: copies, fills and plain kernels in the same run. peers: others that do the same work.
measure: one row for each call. baseline: rows of other runs, matched and compared. host: what a call costs the CPU.
plot: a picture of rows. record: JSON lines. The command line, its table and its progress bar are in tilekernels.cli.
"""
