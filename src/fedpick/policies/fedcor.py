"""FedCor and FedGP: pick the cohort whose training is expected to lower everybody's loss most.

Algorithm (FedCor, algorithms 1 and 2). The loss changes of all clients in one round are modelled as one Gaussian vector
with covariance X'X, column x_k of X being the embedding of client k.
  Warm-up: random cohorts; everybody's loss is measured at the start of every round, and the change since the round
    before is a sample. X maximises the discounted likelihood of the samples (equations 15 to 17) by Adam, starting from
    its last value.
  Afterwards: clients are picked one by one. The prediction for client k is the lower confidence bound
    mu_k - alpha_k sigma_k, alpha_k = beta^(times picked since the last update) (equation 9); the pick is the client
    whose prediction gives the lowest expected global loss (equation 10), and the Gaussian is conditioned on it
    (equation 11).
  Every `interval` rounds: losses are measured at the current model and at the model of a random trial cohort that is
    thrown away; the difference is a new sample, X is learned again and all alpha_k are back at 1.
The model moves by the plain mean of the cohort's updates.

FedGP is the earlier version of the same method: in its warm-up too only one older sample is reused (M = 1).

Deviations: everything is computed in rank d (see `_gaussian`), with the same result as the N x N form. Only available
clients are measured and picked; a missing answer is left out of the likelihood exactly. A client that was never
measured has x = 0 and gets a random column (variance 1/d per entry, as in the authors' code) with its first answer. A
warm-up sample exists only if somebody completed the round before; an update is due `interval` rounds after the last
sample (algorithm 2: at every multiple of `interval`; option `schedule`). As long as there is no sample at all, cohorts
are random. The number of Adam's iterations is not in the papers; the defaults are those of the authors' first code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from fedpick.policies._correlation import Correlation

__all__ = ["FedCor", "FedGP"]

_PAPER: dict[str, Any] = {
    "warmup": 15,
    "sample_from": 0,
    "warmup_training": "each",
    "warmup_iterations": 150,
    "warmup_history": 10,
    "history": 1,
    "history_unit": "updates",
    "theta": 0.9,
    "prior_mean": "zero",
    "selection_noise": "none",
    "schedule": "elapsed",
    "anneal_warmup": False,
}
# In the code, rounds up to and including 15 are random, and an update follows the step of a round that is a multiple.
_CODE = {**_PAPER, "warmup": 16, "schedule": "after-multiples"}
_PRESETS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    "code-2022": {
        **_CODE,
        "sample_from": 10,
        "theta": 0.8,
        "selection_noise": "observation",
        "anneal_warmup": True,
    },
    "code-2023": {
        **_CODE,
        "warmup_training": "end",
        "warmup_iterations": 1000,
        "warmup_history": 100,
        "history": 100,
        "history_unit": "rounds",
        "theta": 0.95,
        "prior_mean": "samples",
        "selection_noise": "prior",
    },
}


@final
@dataclass(frozen=True, kw_only=True)
class FedCor(Correlation):
    """Picks the cohort that a Gaussian process over the clients' loss changes expects to help everybody most.

    Every difference between the paper and the two published versions of the authors' code is an option; `variant` sets
    those that are left None. The default is "paper": what the text states is what the name promises. The version of
    2023 did clearly better where the authors' two programs were run side by side, so for results rather than for
    comparison with the paper try variant="code-2023".

    Args:
        dimension: d, the length of a client's embedding and the rank of the covariance.
        warmup: rounds with random cohorts, whose loss changes are samples.
        interval: rounds between updates of the embedding.
        beta: annealing; a client picked j times since the last update is predicted beta^j as confidently.
        history: M, how many earlier sampling rounds an update reuses, or how many rounds it reaches back (see
            `history_unit`).
        theta: discount of a sample per round of age.
        trials: S, trial cohorts per update.
        noise: standard deviation s of the noise in the likelihood.
        variant: "paper", "code-2022" or "code-2023"; sets the options left None.
        rule: "posterior" (algorithm 1), "independent" (each client by its own gain, the left side of equation 59) or
            "proxy" (the right side: largest sum_i p_i Sigma_ik, without annealing).
        updates: "trial" learns from trial cohorts; "round" needs none: it learns from the loss change over a real
            round, whose cohort was not drawn uniformly as the model assumes.
        initial_scale: expected length of an embedding at its random start.
        learning_rate, iterations: of Adam in an update.
        warmup_iterations: of Adam in one training of the warm-up.
        warmup_training: "each" round of the warm-up, or once at its "end".
        warmup_history: the same as `history`, during the warm-up.
        history_unit: "updates" or "rounds".
        sample_from: the first round whose loss change is a sample.
        prior_mean: "zero", or "samples": every client's discounted mean change.
        selection_noise: where the noise enters the selection: "none", "observation" or "prior".
        schedule: an update is due `interval` rounds after the last sample ("elapsed"), or also before ("multiples") or
            after ("after-multiples") the rounds that are multiples of it.
        anneal_warmup: picks before `sample_from` count for the annealing.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = _PRESETS
    reference: ClassVar[str] = """
        @inproceedings{tang2022fedcor,
          title = {{FedCor}: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated Learning},
          author = {Tang, Minxue and Ning, Xuefei and Wang, Yitu and Sun, Jingwei and Wang, Yu and Li, Hai
                    and Chen, Yiran},
          booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
          year = {2022}
        }"""


@final
@dataclass(frozen=True, kw_only=True)
class FedGP(Correlation):
    """The earlier version of FedCor, which reuses one older sample throughout; options as there."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {**_PRESETS, "paper": {**_PAPER, "warmup_history": 1}}
    reference: ClassVar[str] = """
        @article{tang2021fedgp,
          title = {{FedGP}: Correlation-Based Active Client Selection for Heterogeneous Federated Learning},
          author = {Tang, Minxue and Ning, Xuefei and Wang, Yitu and Wang, Yu and Chen, Yiran},
          journal = {arXiv preprint arXiv:2103.13822},
          year = {2021}
        }"""
