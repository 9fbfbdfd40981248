"""Files that need PyTorch are collected where it is installed."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if find_spec("torch") else ["src/fedpick/sim/torch_engine/*.py", "tests/sim/naive_torch_loop.py"]
)
