"""The Hydra configuration: `train.yaml`, `eval.yaml` and one folder per group."""
