"""The papers' analyses that apply to any policy or federation, as functions of plain arrays; one module per paper.

- `pow_d`: how biased a policy is on a task with known optima, and what the bias costs.
- `ca_fed`: where the error under uneven availability comes from.

What only checks a paper's assumptions or draws its figures is in `benchmarks/theory`, which is not installed.
"""
