"""Measure a trained drafter: the entry for launchers, the same as `outrider eval`.

python eval.py run.dir=runs/eagle3-tiny
"""

import sys

from outrider.train.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]], program="eval.py"))
