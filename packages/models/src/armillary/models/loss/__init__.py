"""Token losses, whole, in chunks that never make all logits, and over a vocabulary that ranks share."""
