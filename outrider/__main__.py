"""`python -m outrider VERB`: the command line, as launchers start it from an installed wheel."""

from outrider.launch.cli import command

if __name__ == "__main__":
    command()
