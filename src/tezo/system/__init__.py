"""What stands below everything else: errors, files, processes, the machine, and what a command says meanwhile."""
