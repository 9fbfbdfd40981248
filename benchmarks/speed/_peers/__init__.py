"""Other engines at the same work, each a program of its own that takes turns with the rest (see `turns`).

The programs run_pfl, run_fedjax and run_torch import nothing of fedpick, so that they run in an environment of their
own; they are started by file name.
"""
