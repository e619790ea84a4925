"""Every way to run a model on a cluster, by predicted time, and the line that starts the best."""
