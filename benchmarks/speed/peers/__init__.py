"""Peers: programs that do the same work in another process and take turns with the rest (see `turns`).

`run_torch`, `run_pfl` and `run_fedjax` do not import fedpick: they run by file name in the environment of a peer.
`run_flower` runs in fedpick's environment, `run_fedpick` with another checkout of fedpick.
"""
