"""What bundles ship of a task."""
