"""Data sets, and partitions that deal their examples to clients.

>>> from fedpick import data
>>> federation = data.partition(data.load("synthetic", num_clients=8), "natural")
>>> len(federation.clients())
8
"""

from fedpick.data.loading import cite, describe, fetch, load, names
from fedpick.data.partition import describe_partition, partition, partition_names
from fedpick.data.sources import cache_directory
from fedpick.data.synthetic import quadratic_optimum
from fedpick.data.types import Dataset, Federation

__all__ = [
    "Dataset",
    "Federation",
    "cache_directory",
    "cite",
    "describe",
    "describe_partition",
    "fetch",
    "load",
    "names",
    "partition",
    "partition_names",
    "quadratic_optimum",
]
