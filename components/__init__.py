"""The stages of the pipeline, a folder each, and the entrypoint of every image."""

from pathlib import Path

STAGES = tuple(sorted(file.parent.name for file in Path(__file__).parent.glob("*/stage.py")))
