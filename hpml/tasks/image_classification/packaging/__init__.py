"""What bundles ship of picture classifiers."""
