"""A Kubernetes cluster: its section of a recipe, its API, pods, causes of failures."""
