"""The analyses that the figures of the papers need: assumptions of FedCor, graphs and counts of FedGS."""
