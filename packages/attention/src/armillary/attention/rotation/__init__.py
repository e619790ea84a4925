"""Ring rotation: topologies, the exchange loop, and the return of results to the ranks that own them."""
