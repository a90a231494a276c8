"""Train a drafter: the entry for launchers, the same as `outrider train`.

accelerate launch train.py drafter=eagle3
"""

import sys

from outrider.launch.cli import command

if __name__ == "__main__":
    command(["train", *sys.argv[1:]], program="train.py")
