"""A client of the job: linear regression on made-up data, with NumPy and NVFlare's client API."""

from __future__ import annotations

import argparse
import os
import signal
import time

import numpy as np
import nvflare.client as flare

KEY = "numpy_key"  # the name that NVFlare's NumPy persistor gives to the model


def data_of(site: int) -> tuple[np.ndarray, np.ndarray]:
    """Examples of one site: each site has its own true model, and its own number of examples."""
    rng = np.random.default_rng(site)
    inputs = rng.normal(size=(50 + 25 * site, 4))
    return inputs, inputs @ (np.arange(4) + 0.3 * site) + 0.1 * rng.normal(size=len(inputs))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", default="", help="a site whose training raises")
    parser.add_argument("--die", default="", help="a site whose process is killed while it trains, in round 1")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long training takes")
    options = parser.parse_args()
    flare.init()
    name = flare.get_site_name()
    inputs, targets = data_of(int(name.removeprefix("site-")))
    while flare.is_running():
        message = flare.receive()
        if message is None:
            break
        weights = np.array(message.params[KEY], dtype=float)
        loss = float(np.mean((inputs @ weights - targets) ** 2))
        if flare.is_evaluate():  # the policy asks for the loss of a model
            flare.send(flare.FLModel(metrics={"loss": loss}))
            continue
        if name == options.fail:
            raise RuntimeError(f"{name} cannot train")
        if name == options.die and message.current_round == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(options.seconds)
        for _ in range(10):
            weights -= 0.05 * inputs.T @ (inputs @ weights - targets) / len(inputs)
        metrics = {"num-examples": len(inputs), "train_loss": loss}
        flare.send(flare.FLModel(params={KEY: weights}, params_type="FULL", metrics=metrics))


if __name__ == "__main__":
    main()
