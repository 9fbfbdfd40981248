"""Print the fingerprint of a run, for `same_selections_in_other_processes`."""

from __future__ import annotations

import importlib
import json
import sys

from fedpick.core.session import Session
from fedpick.testing import fingerprint
from fedpick.testing.federation import FakeFederation


def main(import_path: str, parameters: str) -> None:
    """Run some rounds with the policy at an import path, built with these parameters (JSON)."""
    module, _, name = import_path.partition(":")
    policy = getattr(importlib.import_module(module), name)(**json.loads(parameters))
    world = FakeFederation()
    sys.stdout.write(fingerprint(world.play(Session(policy, world.clients(), 3), 30)))


if __name__ == "__main__":
    main(*sys.argv[1:])
