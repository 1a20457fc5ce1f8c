"""Files that hold data: fetched, unpacked, read within limits. Nothing here knows a task."""
