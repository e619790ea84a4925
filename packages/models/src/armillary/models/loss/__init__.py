"""Token losses: on whole logits, in chunks without all logits, and over a sharded vocabulary."""
