"""The parts of verify.py, the checker that lies beside a published drafter."""
