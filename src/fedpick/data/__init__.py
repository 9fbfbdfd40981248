"""Data sets and how their examples are dealt to clients."""
