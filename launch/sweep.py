"""`train -m`: a grid with one run per combination of values, or a search.

    python train.py -m drafter=eagle,medusa train.lr=1e-3,3e-4
    python train.py -m sweep=search drafter=eagle3
    python train.py -m drafter=eagle,medusa sweep.by=slurm sweep.jobs=8

All runs are validated, and their folders checked to differ, before the first one starts. A run that
fails does not stop the others. The same command resumes a stopped sweep: finished runs end at once,
the others continue.
"""

from outrider.conf.compose import compose
from outrider.conf.packages import require_package
from outrider.conf.sweeps import read_sweep
from outrider.launch.combinations import expand_overrides
from outrider.train.settings import read_groups


def sweep(overrides: list[str]) -> int:
    """Train every combination and compare the runs, or search.

    Returns 0 if all runs succeeded, 130 after Ctrl-C, else the first failure's exit code.
    """
    settings, rest = read_sweep(overrides)
    read_groups(compose(expand_overrides(rest)[0]))  # a wrong key, before torch is imported
    if settings.by == "slurm":
        from outrider.launch import slurm

        slurm.check(settings)
    if settings.trials is not None:
        require_package("optuna", "sweep.trials", settings.trials)
        from outrider.launch.search import search

        return search(rest, settings)
    from outrider.launch.grid import run_grid

    return run_grid(rest, settings)
