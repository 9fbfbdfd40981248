"""Print the fingerprint of a run: what `same_selections_in_other_processes` compares."""

from __future__ import annotations

import importlib
import json
import sys

from fedpick.core.session import Session
from fedpick.testing import fingerprint
from fedpick.testing.federation import FakeFederation


def main(target: str, parameters: str) -> None:
    """Play some rounds with the policy `module:name`, made with these parameters (JSON)."""
    module, _, name = target.partition(":")
    policy = getattr(importlib.import_module(module), name)(**json.loads(parameters))
    world = FakeFederation()
    sys.stdout.write(fingerprint(world.play(Session(policy, world.clients(), 3), 30)))


if __name__ == "__main__":
    main(*sys.argv[1:])
