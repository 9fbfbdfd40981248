"""Experiments: what to run (`spec`), where results go (`store`), how they come about (`runner`)."""

__all__ = ["DEFAULT_STORE"]

# Here and not in `store`: the command line shows it, and must not wait for SQLAlchemy to do so.
DEFAULT_STORE = "results/fedpick.sqlite"
"""Where results go unless the user names another store."""
