"""Predicted times.

clocks.py      one pass of a communication plan, by a clock for every rank
passes.py      attention and recurrent layers of a block, forward and backward
step_time.py   a training step, part by part
"""
