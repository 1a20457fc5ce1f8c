"""Where steps are executed: processes, containers, a Kubernetes cluster."""
