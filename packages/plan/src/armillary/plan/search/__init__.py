"""`armillary-plan search`: ranks meshes, methods and checkpoint policies by predicted time.

candidates.py       meshes, methods and layouts, and packed documents in the rows of a step
search.py           time and memory of all candidates
trainer_config.py   the trainer's configuration of a choice, as a file or as a `torchrun` command
cli.py              the command, with its output as tables, JSON or a plot
"""
