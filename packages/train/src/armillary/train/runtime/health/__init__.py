"""Health of a run's ranks: heartbeats and the watchdog, agreement, stop signals, and the lock of the output folder."""
