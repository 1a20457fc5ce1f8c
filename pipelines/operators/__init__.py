"""A training whose workers are pods, by an operator: PyTorchJob and TrainJob."""
