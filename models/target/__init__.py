"""The frozen target: loading, forward, parts of its layers, devices, and its chat template."""
