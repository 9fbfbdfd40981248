"""Experiments of the papers, their figures and the speed harness; not part of the installed package."""
