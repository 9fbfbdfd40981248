"""The decision core: pure NumPy, no I/O but state files, no clock, no global randomness."""
