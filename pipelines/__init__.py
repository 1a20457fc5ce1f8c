"""What orders and places the steps; the `hpml` command."""
