"""Measure a trained drafter: the entry for launchers, the same as `outrider eval`.

python eval.py run.dir=runs/eagle3-tiny
"""

import sys

from outrider.launch.cli import command

if __name__ == "__main__":
    command(["eval", *sys.argv[1:]], program="eval.py")
