"""What runs beside the servers of a rollout: what brings a bundle there, and what asks a canary."""
