"""Experiments: what to run (`spec`), where results go (`store`), how they come about (`runner`)."""
