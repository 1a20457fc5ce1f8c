"""The same graph for Kubeflow Pipelines."""
