"""Show what the run found: one HTML page with pictures, and the figures as JSON and CSV."""
