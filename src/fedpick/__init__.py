"""fedpick."""
