"""What stands below everything else: errors, files, processes and the meter of a command."""
