"""What everything stands on: errors, contracts, the machine, processes, files."""
