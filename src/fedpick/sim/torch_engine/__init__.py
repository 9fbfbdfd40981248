"""PyTorch behind the seam of `fedpick.sim.engine`: modules of users, and the papers' models."""
