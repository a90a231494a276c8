"""The Hydra configuration: `train.yaml`, `eval.yaml`, `report.yaml` and one folder per group."""
