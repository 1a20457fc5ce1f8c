"""What leaves the process: object storage, tracking, waiting for outages."""
