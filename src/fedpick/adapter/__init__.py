"""What the adapters to real frameworks share: membership, reports of clients, weights, saving, reports of rounds.

An adapter sends the messages of its framework; everything else is here. `fedpick.testing.check_adapter` tests adapters.
"""
