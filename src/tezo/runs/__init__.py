"""What a run has on disk, and how each file is read back: step log, checkpoints, metrics, factor files, header, folder.

It gives the run folder that one process writes and the others read,
and the words for its result. May import tasks and what that may import.
"""
