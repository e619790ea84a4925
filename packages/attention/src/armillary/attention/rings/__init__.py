"""Ring rotation: topologies, the loop that sends shards, and the return of results to the owners of the shards."""
