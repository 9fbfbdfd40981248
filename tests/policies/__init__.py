"""What the tests of policies share."""

from fedpick.testing import CHECKS

# For further configurations of a policy: tests/testing/test_conformance.py runs all checks with the defaults.
QUICK_CHECKS = [
    check for name, check in CHECKS.items() if name not in ("one_million_clients", "same_selections_in_other_processes")
]
