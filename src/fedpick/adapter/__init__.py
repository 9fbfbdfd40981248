"""What the adapters to real frameworks share: who is there, what clients report, weights, saving, reports.

An adapter sends the messages of its framework; the rest is here, once. `fedpick.testing.check_adapter` checks one.
"""
