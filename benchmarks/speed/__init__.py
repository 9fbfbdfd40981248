"""Speed and scale on this machine, as ratios measured side by side: `python -m benchmarks.speed --help`."""
