"""The base of all other packages: errors, files, processes and the meter of a command."""
