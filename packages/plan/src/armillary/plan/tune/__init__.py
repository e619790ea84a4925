"""`armillary-tune`: measures which mesh and attention method train a model fastest on the machine at hand.

command.py        command line
measurements.py   the JSON file of measurements, and their cache key
prune.py          candidates, without those predicted to be slow or not to fit
bench.py          times one block of the model on a candidate's mesh
tuner.py          measures all candidates, then the fastest again in turns
groups.py         a process group for each candidate
screen.py         progress on the terminal
"""
