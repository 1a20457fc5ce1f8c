"""What clients speak: the Open Inference Protocol, and OpenAI's for texts."""
