"""Speed and scale on this machine, as ratios measured side by side.

Every module here is one command, `fedpick bench NAME`: it has a function `command` with typer options that returns the
results as a dict of plain values; the command line prints them and writes them with --json. Modules are found by
their file name and imported only when called for.
"""
