"""Command line, launchers, sweeps, cost estimates, checks before a run and benchmarks."""
