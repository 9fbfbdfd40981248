"""The JAX engine: compiled programs that train and measure whole cohorts."""
