"""Pictures drawn with matplotlib: an experiment for papers, a partition, an availability process."""
