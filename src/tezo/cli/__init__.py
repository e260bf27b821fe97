"""The command line: one file for each command, which parses and prints alone; none imports torch before it runs."""
