"""An NVFlare job whose cohorts come from a fedpick policy; runs in NVFlare's simulator.

pip install 'fedpick[nvflare]'
python job.py --policy pow-d --clients 5 --rounds 10
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

from fedpick.nvflare import PolicyController


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="pow-d")
    parser.add_argument("--options", type=json.loads, default={}, help="the policy's hyper-parameters, as JSON")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=2)
    parser.add_argument("--quorum", type=float, default=1.0)
    parser.add_argument("--train-timeout", type=float, default=60.0)
    parser.add_argument("--state", help="a directory to resume from")
    parser.add_argument("--client", default="", help="arguments of client.py, such as '--fail site-3'")
    parser.add_argument("--workspace", default="nvflare-workspace")
    options = parser.parse_args()

    job = FedJob(name="fedpick", min_clients=1)
    job.to_server(
        PolicyController(
            policy=options.policy,
            policy_options=options.options,
            num_rounds=options.rounds,
            budget=options.budget,
            seed=7,
            quorum=options.quorum,
            min_clients=options.clients,
            train_timeout=options.train_timeout,
            state=options.state,
        )
    )
    job.to_server(NPModelPersistor(model=[0.0, 0.0, 0.0, 0.0]), id="persistor")
    script = str(Path(__file__).with_name("client.py"))
    for site in range(1, options.clients + 1):
        runner = ScriptRunner(script=script, script_args=options.client, framework=FrameworkType.NUMPY)
        job.to(runner, f"site-{site}")
    job.simulator_run(options.workspace, threads=options.clients)


if __name__ == "__main__":
    main()
