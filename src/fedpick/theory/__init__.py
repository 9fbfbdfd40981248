"""The papers' analyses as functions: one module per paper, on plain arrays, for the selections of any policy.

- `power_of_choice`: how biased a policy is on a task with known optima, and what that costs.
- `fedcor`: whether loss changes are Gaussian, and whether their covariance stays.
- `fedgs`: how even selection counts are, how diverse cohorts are, how good a graph is.
- `ca_fed`: where the error under uneven availability comes from.
"""
