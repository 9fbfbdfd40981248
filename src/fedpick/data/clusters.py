"""Clusters of alike clients: the same labels within a cluster, different ones between clusters (CA-Fed, figure 5b)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.availability.markov import cluster_of_clients
from fedpick.core.errors import InvalidInput
from fedpick.data.dealing import Owners, iid, require, require_examples
from fedpick.data.dirichlet import dirichlet_class

__all__ = ["clustered"]


def clustered(
    labels: NDArray[Any],
    num_clients: int,
    rng: np.random.Generator,
    *,
    num_clusters: int = 10,
    alpha: float = 0.5,
    balance: bool = True,
    assignment: str = "blocks",
    attempts: int = 100,
) -> Owners:
    """Clusters of clients: classes cut over them by Dir(alpha), dealt at random within each (CA-Fed, figure 5b).

    The clusters share out the examples as `dirichlet-class` does with clients (`balance`, `attempts` as there); the
    clients of a cluster get equal parts of its examples, to within one. `assignment` says who is in which cluster, as
    in the availability `clustered`: give both the same number of clusters and the same assignment.
    """
    require(
        1 <= num_clusters <= num_clients,
        f"num_clusters must be between 1 and the number of clients, {num_clients}. Got {num_clusters}.",
    )
    require(assignment in ("blocks", "round-robin"), f"assignment is 'blocks' or 'round-robin'. Got {assignment!r}.")
    cluster = cluster_of_clients(num_clients, num_clusters, assignment)
    # Everybody needs an example, so a cluster needs as many as it has clients.
    largest = int(np.bincount(cluster).max())
    require_examples(len(labels), num_clusters, per_client=largest)
    try:
        cluster_of_example = dirichlet_class(
            labels, num_clusters, rng, alpha=alpha, balance=balance, min_examples=largest, attempts=attempts
        )
    except InvalidInput as error:
        raise InvalidInput(
            f"The examples cannot be cut over {num_clusters} clusters of up to {largest} clients: use fewer clusters "
            f"or clients. (Clusters are dealt to like clients: {error})"
        ) from error
    owner = np.empty(len(labels), dtype=np.int32)
    for number in range(num_clusters):
        rows = np.flatnonzero(cluster_of_example == number)
        members = np.flatnonzero(cluster == number).astype(np.int32)
        owner[rows] = members[iid(labels[rows], len(members), rng)]
    return owner
