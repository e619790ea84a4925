"""Predicted seconds of a communication plan and of a whole training step."""
