"""How a run meets its machine: single process, DDP, DeepSpeed, and the plan of its costs."""
