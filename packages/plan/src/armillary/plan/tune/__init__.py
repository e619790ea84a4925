"""Measuring which mesh and which attention method train a model fastest on the machines at hand (`armillary-tune`).

command.py     the command line
question.py    what is asked: all that measurements depend on
file.py        the file: question, measurements and choice
prune.py       candidates, and which of them the planner thinks worth measuring
bench.py       a block of the model on a candidate's mesh, and its seconds
tuner.py       one candidate after the other, and the nearest again in turns
together.py    a process group for each candidate, on which ranks agree
screen.py      what a person sees
"""
