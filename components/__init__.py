"""The stages of the pipeline, a folder each, and the entrypoint of every image."""
