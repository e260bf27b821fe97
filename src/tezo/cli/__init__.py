"""The command line: one file for each command, which parses and prints alone.

It gives `main`; no command's file imports torch before the command runs. May import everything.
"""
