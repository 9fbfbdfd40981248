"""Files that need PyTorch or NVFlare are collected where these are installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("nvflare") else ["src/fedpick/nvflare.py", "examples/nvflare-numpy/*.py"]
if not find_spec("torch"):
    collect_ignore_glob += ["src/fedpick/sim/torch_engine/*.py", "tests/sim/naive_torch_loop.py"]
