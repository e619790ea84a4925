"""One file per method: what it sends and what it computes, in the order of its paper."""
