"""Search over meshes, methods and checkpoint policies by predicted time; `armillary-plan search`.

candidates.py     meshes and methods
fit_policy.py     checkpoint policies, with as many checkpoints as fit
search.py         time and memory of all candidates
report.py         output, as tables, JSON or a plot
command_line.py   the `torchrun` command of a choice
"""
