"""Releases as Deployments of a Kubernetes cluster."""
