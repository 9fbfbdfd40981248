"""Use any fedpick policy with any Flower strategy.

On the server:

    from fedpick.flower import with_policy
    strategy = with_policy(FedAdam(eta=0.1), fedpick.policies.get("fedcor"), budget=10, seed=7)
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=100)

On the client, for policies that query clients before they choose:

    from fedpick.flower import answer_probes
    answer_probes(app, loss=local_loss, num_examples=local_size)
"""

try:
    import flwr  # noqa: F401, only whether it is there
except ModuleNotFoundError as error:
    from fedpick.core.errors import MissingDependency

    raise MissingDependency(
        "The Flower adapter needs Flower. Install it with: pip install 'fedpick[flower]'"
    ) from error

from fedpick.adapter.members import Standing
from fedpick.adapter.report import RoundReport, Step
from fedpick.flower.client import answer_probes
from fedpick.flower.strategy import PolicyStrategy, with_policy

__all__ = ["PolicyStrategy", "RoundReport", "Standing", "Step", "answer_probes", "with_policy"]
